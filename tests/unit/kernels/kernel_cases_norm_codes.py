"""Norms as 8-bit floats by Triton against the norm's and the codes' own kernels, one after the other: interpreted
and on CUDA (``CASES``), and the launches of real models (``launch_all``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.unit.kernels.kernel_cases_layer_ops import EPS, both, random
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.quantization.row_codes import CodeRule

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
Rule = tuple[float, bool, float]
"""The offset of the weight, whether the norm is centred, the factor of what is added to the residual."""
RULES: tuple[Rule, ...] = ((0.0, False, 1.0), (1.0, False, 1.0), (0.0, True, 0.25))
# Hidden size, rule, columns of a scale: Qwen3-0.6B, 8B and 32B, Gemma 2 9B, Command A.
MODELS = (
    (1024, RULES[0], 0), (4096, RULES[0], 0), (4096, RULES[0], 128), (5120, RULES[0], 128),
    (3584, RULES[1], 0), (12288, RULES[2], 0), (12288, RULES[2], 128),
)  # fmt: skip


def check_norm_as_codes(
    device: str, dtype: torch.dtype, size: int, group: int, scale: float | None, rule: Rule
) -> None:
    """Bit by bit the codes of what the norm stores, with and without a residual, which becomes the same sum.

    Rows of zeros, NaN, infinity, rows of wider rows; the twin is the same two steps in PyTorch.
    """
    (norm_codes, twin), (quantise, _) = both("norm_codes"), both("quantise_rows")
    (norm, _), (add_norm, _) = both("norm"), both("add_norm")
    offset, is_centred, factor = rule
    own = NormRule(random((size,), dtype, device, 1), EPS, offset, is_centred)
    x = random((7, size + 24), dtype, device)[:, 8 : 8 + size].add_(0.5)
    x[2], x[4, 5], x[5, size - 1] = 0, torch.nan, torch.inf
    wanted = CodeRule(group, None if scale is None else torch.tensor(scale, device=device))
    first = random((7, size + 8), dtype, device, 2)[:, :size]
    first[2] = 0
    for start in (None, first):
        residuals = [None if start is None else start.clone() for _ in range(3)]
        rows = norm(x, own) if residuals[0] is None else add_norm(x, residuals[0], own, factor)
        expected, expected_scales = quantise(rows, group, wanted.scale)
        found = norm_codes(x, residuals[1], own, wanted, factor)
        assert len(found) == 7 and torch.equal(found.codes.view(torch.uint8), expected.view(torch.uint8))
        torch.testing.assert_close(found.scales, expected_scales, rtol=0, atol=0, equal_nan=True)
        plain = twin(x, residuals[2], own, wanted, factor)
        # A norm's last bit may differ from the twin's, and with it a code by one step.
        whole = [0, 1, 2, 3, 6]
        torch.testing.assert_close(found.codes[whole].float(), plain.codes[whole].float(), rtol=1 / 7, atol=2**-9)
        torch.testing.assert_close(found.scales[whole], plain.scales[whole], rtol=2**-6, atol=0)
        for one in residuals[1:]:
            torch.testing.assert_close(one, residuals[0], rtol=0, atol=0, equal_nan=True)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    return {
        f"norm-as-float8-{dtype}-{size}-{group}-{scale}-{rule}": partial(
            check_norm_as_codes, dtype=dtype, size=size, group=group, scale=scale, rule=rule
        )
        for dtype, size, group, scale, rule in (
            (BFLOAT16, 300, 0, None, RULES[0]), (BFLOAT16, 384, 128, None, RULES[1]),
            (BFLOAT16, 512, 128, None, RULES[2]), (FLOAT16, 1000, 128, None, RULES[0]),
            (FLOAT32, 130, 0, None, RULES[2]), (BFLOAT16, 40, 0, 0.02, RULES[0]),
            (BFLOAT16, 4096, 0, None, RULES[0]), (BFLOAT16, 5120, 128, None, RULES[0]),
        )
    }  # fmt: skip


CASES = make_cases()


def launch_all() -> None:
    """First norms and norms with the residual's sum, and one with a scale for all rows."""
    norm_codes, _ = both("norm_codes")
    for size, (offset, is_centred, scale), group in MODELS:
        x, weight = (torch.empty(*shape, size, dtype=BFLOAT16, device="meta") for shape in ((128,), ()))
        rule = NormRule(weight, EPS, offset, is_centred)
        norm_codes(x, None, rule, CodeRule(group))
        norm_codes(x, torch.empty_like(x), rule, CodeRule(group), scale)
    norm_codes(x, torch.empty_like(x), rule, CodeRule(scale=torch.empty((), device="meta")))


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch, and rows and codes that are read and written in vectors."""
    ptx = kernel.asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    assert not re.search(r"(ld|st)\.global\.b(8|16) ", ptx)
