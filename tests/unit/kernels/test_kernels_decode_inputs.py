"""Inputs of decode steps made on the device: the PyTorch twin, the interpreted kernels, and their compilation."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_cases_decode_inputs import TWIN_CASES, make_cases
from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet
from tp_engine.cpu.kernels.library import native_library

CASES = "kernel_cases_decode_inputs"


@pytest.mark.parametrize("case", TWIN_CASES)
def test_twin(case: str) -> None:
    """Oracle: the host's arithmetic, over three steps with padding among the rows."""
    TWIN_CASES[case]("cpu")


@pytest.mark.parametrize("case", TWIN_CASES)
def test_native(case: str) -> None:
    """Oracle: as for the twin; skipped where nothing can be compiled."""
    if native_library() is None:
        pytest.skip("the native kernels can not be built here")
    make_cases("native")[case]("cpu")


@needs_triton
def test_interpreted_kernels() -> None:
    """Oracle: the host's arithmetic, over three steps with padding among the rows."""
    interpreted(CASES)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU."""
    compile_cases(CASES, capability)
