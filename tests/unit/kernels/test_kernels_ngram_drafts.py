"""Prompt lookup on the device: the PyTorch twin, the interpreted kernel, and its compilation."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_cases_ngram_drafts import TWIN_CASES
from tests.unit.kernels.kernel_harness import CAPABILITIES, compile_cases, interpreted, needs_triton, quiet

CASES = "kernel_cases_ngram_drafts"


@pytest.mark.parametrize("case", TWIN_CASES)
def test_twin(case: str) -> None:
    """Oracle: what rank 0's source of guesses finds in the same texts."""
    TWIN_CASES[case]("cpu")


@needs_triton
def test_interpreted_kernel() -> None:
    """Oracle: what rank 0's source of guesses finds in the same texts."""
    interpreted(CASES)


@needs_triton
@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernel_compiles_for(capability: int) -> None:
    """Oracle: Triton's own compiler, which needs no GPU."""
    compile_cases(CASES, capability)
