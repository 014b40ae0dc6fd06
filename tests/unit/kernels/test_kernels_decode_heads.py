"""Decode attention that prepares heads itself: interpreted, and compiled."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet


@needs_triton
def test_interpreted_kernel() -> None:
    """Oracle: ``prepare_heads``, then attention, in plain PyTorch and float32; the error is at most twice theirs."""
    interpreted("kernel_cases_decode_heads", timeout_s=270)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; that GPU has enough shared memory."""
    from tests.unit.kernels.kernel_cases_paged_attention import SHARED_MEMORY

    for kernel in compile_cases("kernel_cases_decode_heads", capability):
        assert kernel.metadata.shared <= SHARED_MEMORY[capability]
