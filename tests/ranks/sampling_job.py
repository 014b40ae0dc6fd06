"""Sample on torchrun's ranks, from slices and from the whole logits; any difference is an error.

torchrun --nproc-per-node N -m tests.ranks.sampling_job
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from tests.unit.sampling.sampler_cases import mixed_samplings
from tp_engine.distributed.collectives import ProcessGroupCommunicator, SingleRank
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.model_config import padded_vocab_size
from tp_engine.plan import RowSampling
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import ALONE, SamplingState

SAMPLINGS = [
    *mixed_samplings(12),
    RowSampling(temperature=1.0, top_p=0.9, seed=1, logprobs=2),
    RowSampling(temperature=1.0, top_p=0.9999, seed=2),
]


def main() -> None:
    """Sample some steps of rows of every kind; one seed gives every rank the same whole logits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    communicator = ProcessGroupCommunicator(info, group, RankProgress())
    for vocab_size, dtype in ((2000, torch.float32), (20_001, torch.bfloat16)):
        for processed in (False, True):
            compare(communicator, vocab_size, dtype, processed)
    dist.destroy_process_group()


def compare(communicator: ProcessGroupCommunicator, vocab_size: int, dtype: torch.dtype, processed: bool) -> None:
    """Oracle: the sampler of a single rank, on the whole logits; in both modes of log-probabilities."""
    info, count, device = communicator.info, len(SAMPLINGS), torch.device("cpu")
    state, whole = (
        SamplingState(max_num_seqs=count, vocab_size=vocab_size, device=device, info=one, scores_processed=processed)
        for one in (info, ALONE)
    )
    for row, sampling in enumerate(SAMPLINGS):
        for one in (state, whole):
            one.admit(row, sampling, np.arange(row, row + 5, dtype=np.int32), 3)
    parallel, gathered = Sampler(state, communicator), Sampler(whole, SingleRank())
    generator = torch.Generator().manual_seed(vocab_size)
    rows = np.arange(count, dtype=np.int32)
    for step in range(5):
        logits = (torch.randn(count, vocab_size, generator=generator) * 3).to(dtype)
        padding = padded_vocab_size(vocab_size, info.world_size) - vocab_size
        own = torch.nn.functional.pad(logits, (0, padding)).chunk(info.world_size, dim=1)[info.rank]
        positions = np.full(count, 5 + step, dtype=np.int32)
        tokens, scores = parallel.sample(own, rows, positions)
        expected, expected_scores = gathered.sample(logits, rows, positions)
        assert torch.equal(tokens, expected), f"rank {info.rank}, step {step}: {tokens} instead of {expected}"
        if info.is_first:
            assert scores is not None and expected_scores is not None
            assert torch.equal(scores.logprobs, expected_scores.logprobs)
            assert torch.equal(scores.ranks, expected_scores.ranks)


if __name__ == "__main__":
    main()
