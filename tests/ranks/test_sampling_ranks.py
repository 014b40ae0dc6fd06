"""Sampling from slices of the vocabulary over gloo."""

from __future__ import annotations

import pytest

from tests.ranks import sampling_job
from tests.ranks.warm_ranks import warm_ranks
from tests.tiers import fast_first


@pytest.mark.parametrize("world_size", fast_first(1, [2, 3]))
def test_ranks_sample_what_one_rank_samples(world_size: int) -> None:
    """Oracle: ``Sampler`` on the whole logits, within the job; rows of every kind, padded vocabularies."""
    warm_ranks(world_size, sampling_job.main)
