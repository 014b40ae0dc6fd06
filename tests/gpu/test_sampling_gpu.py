"""The sampling kernels on a GPU in a CUDA graph, and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.kernel_harness import needs_triton
from tp_engine.distributed.collectives import SingleRank
from tp_engine.plan import RowSampling

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), needs_triton]


def test_captured() -> None:
    """Oracle: the same launches without a graph; between replays rows, positions and logits change."""
    from tests.unit.kernels.kernel_cases_sampling import FILTERED, MIN_P, PENALISED, PLAIN, RANKED, make_state
    from tp_engine.sampling.device_sampler import DeviceSampler, Filters, SamplerVariant

    samplings: list[RowSampling] = [*PLAIN, *MIN_P, *RANKED, *FILTERED, *PENALISED]
    captured, eager = (
        DeviceSampler(make_state(samplings, 5000, "cuda", has_tables=True), SingleRank()) for _ in range(2)
    )
    kind, count = SamplerVariant(Filters.RANKED, penalised=True, min_p=True), 8
    logits = torch.zeros(count, 5000, dtype=torch.bfloat16, device="cuda")
    rows = torch.full((count,), -1, dtype=torch.int32, device="cuda")
    positions = torch.full((count,), -1, dtype=torch.int64, device="cuda")
    for _ in range(2):
        captured.sample(kind, logits, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = captured.sample(kind, logits, rows, positions)
    generator = np.random.default_rng(0)
    for step in range(5):
        chosen = 2 * generator.permutation(len(samplings))[:count] + 1
        rows.copy_(torch.from_numpy(chosen))
        positions.fill_(20 + step)
        logits.copy_(torch.randn(logits.shape) * 3)
        graph.replay()
        assert torch.equal(tokens, eager.sample(kind, logits, rows, positions))


def test_masks() -> None:
    """Oracle: the same rows on a CPU; greedy, so that rounding changes no token."""
    from tp_engine.sampling.sampler import Sampler
    from tp_engine.sampling.state import SamplingState

    count, vocab, generator = 6, 5003, np.random.default_rng(1)
    logits = torch.from_numpy(generator.normal(size=(count, vocab)).astype(np.float32))
    masks = generator.integers(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    rows, masked = np.arange(count, dtype=np.int32), np.array([5, 0, 2], dtype=np.int32)
    found = []
    for device in ("cpu", "cuda"):
        state = SamplingState(max_num_seqs=count, vocab_size=vocab, device=torch.device(device), has_tables=False)
        for row in rows.tolist():
            state.admit(row, RowSampling(logprobs=2 if row == 5 else -1), rows[:2], 2)
        state.masks.set(masked, masks)
        tokens, _ = Sampler(state, SingleRank()).sample(logits.to(device), rows, np.full(count, 4, dtype=np.int32))
        found.append(tokens.tolist())
    assert found[0] == found[1]
