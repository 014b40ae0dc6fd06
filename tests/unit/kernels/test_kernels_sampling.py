"""The noise of sampling kernels, and the rows that they sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.kernel_harness import needs_triton
from tests.unit.sampling.sampler_cases import ids
from tp_engine.distributed.collectives import SingleRank
from tp_engine.distributed.rank import RankInfo
from tp_engine.plan import RowSampling
from tp_engine.sampling import noise
from tp_engine.sampling.device_sampler import DeviceSampler, SamplerVariant
from tp_engine.sampling.state import SamplingState


def test_noise_keys_on_the_device() -> None:
    """Oracle: ``noise_keys``, in unsigned 64-bit numpy."""
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    positions = generator.integers(0, 2**31, 1000).astype(np.int32)
    found = noise.device_noise_keys(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), noise.noise_keys(seeds, positions))


NUCLEUS = RowSampling(temperature=1.0, top_p=0.9)
PENALISED = RowSampling(presence_penalty=1.0)


@needs_triton
@pytest.mark.parametrize(
    ("samplings", "alone", "with_others"),
    [
        ([RowSampling(), RowSampling(temperature=1.0)], SamplerVariant(), SamplerVariant()),
        ([RowSampling(), PENALISED], SamplerVariant(penalised=True), SamplerVariant(penalised=True)),
        ([RowSampling(temperature=1.0, min_p=0.1)], SamplerVariant(min_p=True), SamplerVariant(min_p=True)),
        ([RowSampling(min_p=0.1, top_k=5, top_p=0.5)], SamplerVariant(), SamplerVariant()),
        ([RowSampling(temperature=1.0, top_k=64, min_p=0.1)], SamplerVariant(ranked=True), SamplerVariant(ranked=True)),
        ([RowSampling(temperature=1.0, top_k=65)], SamplerVariant(ranked=True), None),
        ([NUCLEUS, PENALISED], SamplerVariant(nucleus=True, penalised=True), None),
        ([NUCLEUS, RowSampling(temperature=1.0, top_k=9)], SamplerVariant(ranked=True), None),
        ([RowSampling(temperature=1.0, top_k=9, presence_penalty=1.0)], None, None),
        ([RowSampling(logprobs=0)], None, None),
        ([RowSampling(allowed_token_ids=ids(4))], None, None),
        ([RowSampling(min_tokens=5, stop_token_ids=ids(4))], None, None),
    ],
)
def test_kinds_of_steps(
    samplings: list[RowSampling], alone: SamplerVariant | None, with_others: SamplerVariant | None
) -> None:
    """Oracle: the table in ``device_sampler``, for one rank and for two."""
    for world_size, expected in ((1, alone), (2, with_others)):
        info = RankInfo(world_size=world_size, local_world_size=world_size)
        state = SamplingState(max_num_seqs=4, vocab_size=100, device=torch.device("cpu"), info=info, has_tables=True)
        communicator = SingleRank()
        communicator.info = info
        for row, sampling in enumerate(samplings):
            state.admit(row, sampling, ids(1, 2, 3), 3)
        rows = np.arange(len(samplings), dtype=np.int32)
        sampler = DeviceSampler(state, communicator)
        assert sampler.kind_of(rows, np.full(len(samplings), 4, np.int32)) == expected
        state.release(rows)
        assert sampler.kind_of(rows, np.full(len(samplings), 4, np.int32)) == SamplerVariant()
