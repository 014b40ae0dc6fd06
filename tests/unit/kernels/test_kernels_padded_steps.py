"""Inputs of padded steps made on the device: the PyTorch twin, the interpreted kernels, and their compilation."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_cases_padded_steps import TWIN_CASES, launch_all
from tests.unit.kernels.kernel_harness import (
    CAPABILITIES,
    compile_cases,
    compiled_for,
    interpreted,
    needs_triton,
    quiet,
)

CASES = "kernel_cases_padded_steps"


@pytest.mark.parametrize("case", TWIN_CASES)
def test_twin(case: str) -> None:
    """Oracle: the host's arithmetic, token by token."""
    TWIN_CASES[case]("cpu")


@needs_triton
def test_interpreted_kernels() -> None:
    """Oracle: the host's arithmetic, token by token."""
    interpreted(CASES)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU."""
    compile_cases(CASES, capability)


@needs_triton
@quiet
def test_sizes_of_steps_share_kernels() -> None:
    """Oracle: Triton's own cache: one kernel begins steps for each of two widths of block tables, one ends them;
    no size of a step adds to it."""
    with compiled_for(90) as kernels:
        launch_all()
    assert len({id(kernel) for kernel in kernels}) == 3
