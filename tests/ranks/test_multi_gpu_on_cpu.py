"""The tests of tests/multi_gpu on two CPU ranks, so that errors show up without GPUs."""

from __future__ import annotations

import pytest

from tests.ranks.launch import torchrun

pytestmark = pytest.mark.slow


def test_the_multi_gpu_suite_passes_with_gloo() -> None:
    """Oracles: those in tests/multi_gpu."""
    job = torchrun(2, ["-m", "pytest", "-q", "tests/multi_gpu"])
    assert job.returncode == 0, job.stdout[-6000:]
    assert job.stdout.count(" passed") == 2, job.stdout[-3000:]
