"""Codecs of the host tier on a GPU: blocks that go to pinned memory and back on a stream."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.kv_tiers import moves
from tests.unit.kernels.kernel_harness import needs_triton
from tp_engine.features.tiers.codecs import make_codec
from tp_engine.features.tiers.codecs.pca import TOKENS_PER_DIM
from tp_engine.features.tiers.rank_host import HostTierWorker
from tp_engine.job.tier_progress import CHANNEL_WORDS, TierProgress, TierProgressReader, TierReport
from tp_engine.model_config.kv_layout import KvKind, MoveCounters, lay_out
from tp_engine.plan import NO_PAIRS, IntArray, StepPlan
from tp_engine.system.units import ceil_div
from tp_engine.worker.memory.kv_cache import KvCacheShape

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), needs_triton]

DIM, BLOCK_SIZE, NUM_MOVED = 32, 16, 24
NUM_CALIBRATION = ceil_div(TOKENS_PER_DIM * DIM, BLOCK_SIZE)
# Errors of a head's vectors in a block, relative to their norm.
LARGEST_ERROR = {"none": 0.0, "int8": 0.02, "fp8": 0.05, f"pca:{DIM}": 0.05}


class Outcome(NamedTuple):
    """The blocks that were loaded, what was reported of stores, and the counters."""

    blocks: torch.Tensor
    report: TierReport
    counters: MoveCounters


def moved(name: str, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, Outcome]:
    """Blocks, and what came of them: plans that calibrate, store, load what was stored elsewhere, and report."""
    kind = KvKind(window=None, num_kv_heads=3, head_dim=DIM)
    shape = KvCacheShape(layout=lay_out([kind] * 4), block_size=BLOCK_SIZE, dtype=dtype)
    num_blocks = NUM_CALIBRATION + 2 * NUM_MOVED
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_blocks, shape.block_bytes // dtype.itemsize, generator=generator)
    pool = states.to(dtype).view(torch.uint8).to(device)
    words = memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q")
    stores = TierProgress(words) if name.startswith("pca") else None
    tier = HostTierWorker(pool, num_blocks, make_codec(name, shape, 0), stores)
    numbers = np.arange(num_blocks, dtype=np.int32)
    first, rest = (np.stack((part, part), 1) for part in np.split(numbers[:-NUM_MOVED], [NUM_CALIBRATION]))
    back: IntArray = np.stack((rest[:, 0], numbers[-NUM_MOVED:][::-1]), 1)
    tier.apply(StepPlan(step_id=1, extensions=moves(stores=first)))
    tier.apply(StepPlan(step_id=2, extensions=moves(stores=rest)))
    tier.apply(StepPlan(step_id=3, extensions=moves(loads=back, wait_load=3)))
    if device == "cuda":
        torch.cuda.synchronize()
    tier.apply(StepPlan(step_id=4, extensions=moves(stores=NO_PAIRS)))
    found = pool[back[:, 1].tolist()].cpu().view(dtype)
    outcome = Outcome(found, TierProgressReader([words]).poll(), tier.counters)
    tier.close()
    return states.to(dtype)[rest[:, 0].tolist()], outcome


def check(name: str, dtype: torch.dtype, device: str) -> None:
    """Oracle: the blocks before, within the codec's error; the same moves on a CPU: reports, counters, and to the bit
    for ``none``."""
    (given, found), (_, expected) = moved(name, dtype, device), moved(name, dtype, "cpu")
    for one in (found, expected):
        heads = [states.float().view(NUM_MOVED, -1, BLOCK_SIZE, 3, DIM) for states in (one.blocks, given)]
        errors = (heads[0] - heads[1]).square().sum((2, 4)).sqrt() / heads[1].square().sum((2, 4)).sqrt()
        assert float(errors.max()) <= LARGEST_ERROR[name]
    assert found.report == expected.report
    if name.startswith("pca"):
        assert found.report == (NUM_CALIBRATION + NUM_MOVED, tuple(range(1, NUM_CALIBRATION + 1)))
    assert found.counters.stored_bytes == expected.counters.stored_bytes > 0
    assert found.counters.loaded_bytes == expected.counters.loaded_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGEST_ERROR)
def test_blocks_come_back(name: str, dtype: torch.dtype) -> None:
    """Oracle: see ``check``."""
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit floats")
    check(name, dtype, "cuda")
