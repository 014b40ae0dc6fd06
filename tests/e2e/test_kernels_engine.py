"""A whole engine on the data path of GPUs, without one: its kernels interpreted."""

from __future__ import annotations

import pytest

from tests.unit.kernel_harness import interpreted, needs_triton


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_engine() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, greedy and sampled."""
    interpreted("kernel_cases_engine", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_masks() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, one row of which follows a grammar."""
    interpreted("kernel_cases_masks", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_groups() -> None:
    """Oracle: the same model with one block table for all layers, its tokens and log-probabilities bit by bit."""
    interpreted("kernel_cases_kv_groups", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_warm_up() -> None:
    """Oracle: the launches of the start: serving adds no specialisation of a kernel, so nothing is compiled then."""
    interpreted("kernel_cases_warm_up", timeout_s=270)
