"""Linear layers of one row as a Triton kernel: interpreted, compiled, and chosen for the layers that suit it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet

CASES = "kernel_cases_one_row_linear"
pytestmark = needs_triton


def test_interpreted_kernels() -> None:
    """Oracle: float64; the error is at most twice that of PyTorch's product in the same precision."""
    interpreted(CASES)


@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; with dependent launch where the GPU has it."""
    for kernel in compile_cases(CASES, capability):
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)


@pytest.mark.parametrize(
    ("rows", "columns", "is_gated", "is_taken"),
    [
        (64, 1024, False, True),
        (64, 1000, False, False),
        (63, 4096, False, False),
        (65, 4096, True, False),
        (66, 4096, True, True),
    ],
)
def test_what_is_taken(rows: int, columns: int, is_gated: bool, is_taken: bool) -> None:
    """Oracle: whole blocks only."""
    from tp_engine.kernels.linear.one_row_linear_triton import takes_weight

    assert takes_weight(torch.empty(rows, columns, device="meta"), is_gated=is_gated) is is_taken
