"""The layers' small operations as Triton kernels: interpreted, and compiled for the supported GPUs."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet

pytestmark = pytest.mark.parametrize(
    "cases", ["kernel_cases_layer_ops", "kernel_cases_heads", "kernel_cases_experts", "kernel_cases_delta"]
)


@needs_triton
def test_interpreted_kernels(cases: str) -> None:
    """Oracle: float64; the error is at most twice that of the PyTorch twin in the same precision."""
    interpreted(cases)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int, cases: str) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; with dependent launch where the GPU has it."""
    for kernel in compile_cases(cases, capability):
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
