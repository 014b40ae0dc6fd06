"""Linear layers as trees over shards, as a Triton kernel: interpreted and compiled."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet

CASES = "kernel_cases_tree_linear"
pytestmark = needs_triton


def test_interpreted_kernels() -> None:
    """Oracle: float64; the same row alone; the parts of 1, 2, 4 and 8 ranks, added as a tree, bit by bit."""
    interpreted(CASES)


@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; with dependent launch where the GPU has it."""
    for kernel in compile_cases(CASES, capability):
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
