"""Norms whose rows become 8-bit floats: the interpreted kernel, its compilation, and its sums."""

from __future__ import annotations

import re

import pytest
import torch

from tests.unit.kernels.kernel_cases_layer_ops import EPS, both
from tests.unit.kernels.kernel_cases_norm_codes import BFLOAT16, MODELS
from tests.unit.kernels.kernel_harness import (
    CAPABILITIES,
    compile_cases,
    compiled_for,
    interpreted,
    needs_triton,
    quiet,
)
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.quantization.row_codes import CodeRule

pytestmark = needs_triton
# GPUs from compute capability 8.9 on have e4m3; on others no product reads codes.
WITH_E4M3 = [capability for capability in CAPABILITIES if capability >= 89]


def test_interpreted_kernel() -> None:
    """Oracle: the norm's kernel, then that of codes, bit by bit; and the twin."""
    interpreted("kernel_cases_norm_codes")


@quiet
@pytest.mark.parametrize("capability", WITH_E4M3)
def test_kernel_compiles_for(capability: int) -> None:
    """Oracle: Triton's own compiler; dependent launch, and rows and codes that are read and written in vectors."""
    for kernel in compile_cases("kernel_cases_norm_codes", capability):
        ptx = kernel.asm["ptx"]
        assert "griddepcontrol.wait" in ptx
        assert not re.search(r"(ld|st)\.global\.b(8|16) ", ptx)


@quiet
@pytest.mark.parametrize("capability", WITH_E4M3)
@pytest.mark.parametrize("adds", [False, True])
def test_sums_are_those_of_the_norm(capability: int, adds: bool) -> None:
    """Oracle: the compiled kernel of the norm alone: threads add up the same columns in the same order, so a GPU's
    codes are bit by bit those of the stored norm."""
    (norm_codes, _), (norm, _), (add_norm, _) = both("norm_codes"), both("norm"), both("add_norm")
    for size, (offset, is_centred, scale), group in MODELS:
        x, weight = (torch.empty(*shape, size, dtype=BFLOAT16, device="meta") for shape in ((128,), ()))
        rule, residual = NormRule(weight, EPS, offset, is_centred), torch.empty_like(x) if adds else None
        with compiled_for(capability) as kernels:
            norm_codes(x, residual, rule, CodeRule(group), scale)
            norm(x, rule) if residual is None else add_norm(x, residual, rule, scale)
        found, expected = (sums_of(kernel.asm["ttgir"]) for kernel in kernels)
        assert len(expected) == 1 + is_centred and found == expected, (size, group)


def sums_of(ttgir: str) -> list[str]:
    """How the values of each sum of floats lie in the threads of a compiled kernel, in its order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r": \(tensor<(\w+), (#\w+)>\) -> f32", ttgir)
    return [f"{shape} {layouts[layout]}" for shape, layout in found]
