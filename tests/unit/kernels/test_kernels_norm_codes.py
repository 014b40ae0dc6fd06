"""The sums of norms whose rows become 8-bit floats."""

from __future__ import annotations

import re

import pytest
import torch

from tests.unit.kernels.kernel_cases_layer_ops import EPS, both
from tests.unit.kernels.kernel_cases_norm_codes import BFLOAT16, MODELS
from tests.unit.kernels.kernel_harness import compiled_for, needs_triton, quiet
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.quantization.row_codes import CodeRule

pytestmark = needs_triton


@quiet
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
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
