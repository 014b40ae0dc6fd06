"""Inputs of padded steps made on the device: the PyTorch twin, and the kernels that steps share."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_cases_padded_steps import TWIN_CASES, launch_all
from tests.unit.kernels.kernel_harness import compiled_for, needs_triton, quiet


@pytest.mark.parametrize("case", TWIN_CASES)
def test_twin(case: str) -> None:
    """Oracle: the host's arithmetic, token by token."""
    TWIN_CASES[case]("cpu")


@needs_triton
@quiet
def test_sizes_of_steps_share_kernels() -> None:
    """Oracle: Triton's own cache: one kernel begins steps for each of two widths of block tables, one ends them;
    no size of a step adds to it."""
    with compiled_for(90) as kernels:
        launch_all()
    assert len({id(kernel) for kernel in kernels}) == 3
