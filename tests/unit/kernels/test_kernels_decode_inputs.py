"""Inputs of decode steps made on the device: the PyTorch twin, and C."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_cases_decode_inputs import TWIN_CASES, make_cases
from tp_engine.cpu.library import native_library


@pytest.mark.parametrize("case", TWIN_CASES)
def test_twin(case: str) -> None:
    """Oracle: the host's arithmetic, over three steps with padding among the rows."""
    TWIN_CASES[case]("cpu")


@pytest.mark.parametrize("case", TWIN_CASES)
def test_native(case: str) -> None:
    """Oracle: as for the twin; skipped where nothing can be compiled."""
    if native_library() is None:
        pytest.skip("the native kernels cannot be built here")
    make_cases("native")[case]("cpu")
