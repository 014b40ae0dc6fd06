"""Ranks of one host divide its cores, from the first weight on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launch import torchrun
from tests.ranks.threads_job import NUM_CORES

pytestmark = pytest.mark.slow


def test_threads_while_loading_and_while_serving(checkpoint: Callable[..., Path]) -> None:
    """Oracle: cores divided by ranks, on every rank and in both phases, although torchrun sets one thread."""
    job = torchrun(2, ["-m", "tests.ranks.threads_job", str(checkpoint("qwen3"))])
    assert job.returncode == 0, job.stdout[-6000:]
    said = set(
        re.findall(r"rank (\d) (loading|serving): (\d+) threads", job.stdout)
    )  # lines of two ranks may run together
    share = str(NUM_CORES // 2)
    assert said == {(rank, phase, share) for rank in "01" for phase in ("loading", "serving")}
