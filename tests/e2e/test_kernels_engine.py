"""A whole engine on the data path of GPUs, without one: its kernels interpreted."""

from __future__ import annotations

import pytest

from tests.unit.kernel_harness import interpreted, needs_triton


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_engine() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, greedy and sampled."""
    interpreted("kernel_cases_engine", timeout_s=270)
