"""The layers' small operations as Triton kernels: interpreted, and compiled for the GPUs that are meant."""

from __future__ import annotations

import pytest

from tests.unit.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet

CASES = "kernel_cases_layer_ops"


@needs_triton
def test_interpreted_kernels() -> None:
    """Oracle: float64; the error is at most twice that of the PyTorch twin in the same precision."""
    interpreted(CASES)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU."""
    compile_cases(CASES, capability)
