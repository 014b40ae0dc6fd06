"""Sampling from slices of the vocabulary over gloo."""

from __future__ import annotations

import pytest

from tests.ranks.launch import torchrun


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_sample_what_one_rank_samples(world_size: int) -> None:
    """Oracle: ``Sampler`` on the whole logits, within the job; rows of every kind, padded vocabularies."""
    job = torchrun(world_size, ["-m", "tests.ranks.sampling_job"], timeout_s=120)
    assert job.returncode == 0, job.stdout[-6000:]
