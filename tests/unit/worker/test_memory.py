"""The ledger, its golden numbers, overrides, errors and the report."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

from tests.unit.worker.memory_cases import FakeDevice, on_ranks
from tp_engine.distributed.rank import Agreeing
from tp_engine.errors import MemoryBudgetError
from tp_engine.job.topology import RankInfo
from tp_engine.model_config.kv_layout import KvCapacity, KvKind, KvLayout, kv_cache_lines, lay_out
from tp_engine.system.units import GIB, MIB, format_gib
from tp_engine.worker.device import MemorySnapshot
from tp_engine.worker.memory.kv_cache import KvCacheShape
from tp_engine.worker.memory.ledger import (
    MemoryLedger,
    compute_ledger,
    ledger_json,
    ledger_table,
    requested_bytes,
)
from tp_engine.worker.memory.meter import MemoryMeter, choose_blocks, log_memory, settle_blocks

ONE_GROUP = lay_out([KvKind(window=None, num_kv_heads=2, head_dim=64)] * 4)
SHAPE = KvCacheShape(layout=ONE_GROUP, block_size=16, dtype=torch.bfloat16)
# A block for each of a full layer and three with a window of 48.
FOUR_GROUPS = lay_out([KvKind(window=window, num_kv_heads=2, head_dim=64) for window in (48, None, 48, 48)])
LEDGER = MemoryLedger(
    total=80 * GIB,
    requested=72 * GIB,
    weights=60 * GIB,
    activations=3 * GIB,
    non_torch=2 * GIB,
    tables=GIB // 2,
    cuda_graphs=GIB // 2,
)


@pytest.mark.parametrize(
    ("dimensions", "num_bytes"),
    [
        ((80, 16, 8, 64, 2), 2_621_440),
        ((28, 256, 8, 128, 2), 29_360_128),
        ((80, 16, 1, 128, 2), 655_360),
    ],
)
def test_block_bytes(dimensions: tuple[int, int, int, int, int], num_bytes: int) -> None:
    """GOLDEN A4: the allocation guide's 80-layer model, Qwen3-0.6B (28 MiB), a real 70B at TP 8."""
    layers, block_size, heads, head_dim, itemsize = dimensions
    layout = lay_out([KvKind(window=None, num_kv_heads=heads, head_dim=head_dim)] * layers)
    assert layout.block_bytes(block_size, itemsize) == num_bytes


def test_block_bytes_with_scales() -> None:
    """By hand: a quantised cache pays for its scales."""
    layout = lay_out([KvKind(window=None, num_kv_heads=1, head_dim=64)])
    assert layout.block_bytes(16, 1, has_scales=True) == layout.block_bytes(16, 1) + 128


def single_snapshot_available(*, total: int, utilization: float, used: int, peak: int, current: int) -> int:
    """nano-vllm's formula; ``used`` is the whole device's, ``peak`` and ``current`` are torch's."""
    return int(total * utilization) - used - peak + current


def test_single_snapshot_formula() -> None:
    """GOLDEN A5: 17 G and 621 blocks of 28 MiB follow from binary G (10**9 would give 579 blocks)."""
    available = single_snapshot_available(
        total=int(23.48 * GIB), utilization=0.9, used=int(3.69 * GIB), peak=int(1.58 * GIB), current=int(1.14 * GIB)
    )
    assert round(available / GIB, 1) == 17.0
    assert available // (28 * MIB) == 621


def test_size_of_the_guides_cache() -> None:
    """GOLDEN A6: (10800, 80, 2, 16, 8, 64) fp16 is 28,311,552,000 bytes, 26.37 GiB, 172,800 tokens."""
    layout = lay_out([KvKind(window=None, num_kv_heads=8, head_dim=64)] * 80)
    shape = KvCacheShape(layout=layout, block_size=16, dtype=torch.float16)
    cache, scales = shape.views_of(torch.empty(10_800, shape.block_bytes, dtype=torch.uint8, device="meta"))
    assert cache.shape == (10_800, 80, 2, 16, 8, 64) and scales is None
    assert 10_800 * shape.block_bytes == 28_311_552_000
    assert format_gib(28_311_552_000) == "26.37 GiB"


def test_lines_on_the_cache() -> None:
    """GOLDEN A7: the three lines that users look for."""
    capacity = KvCapacity(layout=ONE_GROUP, block_size=16, max_model_len=4_096, chunk_tokens=2_048)
    num_tokens, num_bytes = capacity.num_tokens(2_526), 2_526 * 16 * 131_072
    assert kv_cache_lines(num_bytes=num_bytes, num_tokens=num_tokens, max_model_len=4_096) == (
        "Available KV cache memory: 4.93 GiB",
        "GPU KV cache size: 40,416 tokens",
        "Maximum concurrency for 4,096 tokens per request: 9.87x",
    )


def profile(device: FakeDevice, *, utilization: float = 0.9, meanwhile: int = 0, trial: int = 0) -> MemoryLedger:
    """16 GiB of weights, 3 GiB of activations, 1 GiB of non-torch; the co-tenant changes by ``meanwhile`` per phase.
    What an earlier engine of the process has left in torch's cache is there for this one."""
    device.cached = 20 * GIB
    profiler = MemoryMeter(device, utilization=utilization)
    device.allocate(20 * GIB)  # a checkpoint needs more while it loads than when it is loaded
    device.allocate(-4 * GIB)
    device.co_tenant += meanwhile
    profiler.weights_loaded()
    if trial:
        device.allocate(trial)
        profiler.steps_begin()
    device.allocate(3 * GIB)
    device.allocate(-3 * GIB)
    device.cached = 3 * GIB
    device.non_torch += GIB
    device.co_tenant += meanwhile
    return profiler.finish(tables=GIB // 8, cuda_graphs=GIB // 4)


def test_ledger_of_a_start() -> None:
    """Oracle: the fake process's allocations in each phase."""
    ledger = profile(FakeDevice())
    assert ledger == MemoryLedger(
        total=80 * GIB,
        requested=72 * GIB,
        weights=16 * GIB,
        activations=3 * GIB,
        non_torch=GIB,
        tables=GIB // 8,
        cuda_graphs=GIB // 4,
    )
    assert ledger.available == 72 * GIB - 20 * GIB - GIB // 8 - GIB // 4


def test_what_is_there_for_the_steps_trial_is_not_charged() -> None:
    """Oracle: the ledger without a trial; the trial's cache and tables are gone when the real ones are allocated."""
    assert profile(FakeDevice(), trial=2 * GIB) == profile(FakeDevice())


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", [-2 * GIB, 2 * GIB])
def test_a_co_tenant_is_not_charged(meanwhile: int) -> None:
    """Promise 13: another process grows or shrinks during profiling. Oracle: the ledger without it."""
    device = FakeDevice()
    device.co_tenant = 5 * GIB
    assert profile(device, meanwhile=meanwhile) == profile(FakeDevice())


def test_requesting_more_than_is_free() -> None:
    """Oracle: the error has the request, the total, the free memory, and a utilization that fits."""
    device = FakeDevice()
    device.co_tenant = 20 * GIB
    with pytest.raises(MemoryBudgetError, match=r"72\.00 GiB of the device's 80\.00 GiB.*59\.50 GiB.*at most 0\.74"):
        MemoryMeter(device, utilization=0.9)
    assert MemoryMeter(device, utilization=0.74)


def test_a_shared_host_gives_the_share_of_what_is_free() -> None:
    """By hand: host memory is rarely 90 % free, so a CPU rank takes 90 % of the free part."""
    snapshot = MemorySnapshot(total=100, free=50, torch_allocated=0, torch_reserved=0, torch_peak=0, non_torch=0)
    assert requested_bytes(snapshot, 0.9, is_shared=True) == 45
    assert requested_bytes(snapshot, 0.4, is_shared=True) == 40


def test_terms_that_shrink_are_no_gain() -> None:
    """Oracle: a buffer freed between snapshots does not enlarge the cache."""
    big = MemorySnapshot(total=100, free=50, torch_allocated=20, torch_reserved=20, torch_peak=20, non_torch=9)
    small = MemorySnapshot(total=100, free=70, torch_allocated=10, torch_reserved=10, torch_peak=15, non_torch=1)
    ledger = compute_ledger(big, small, small, requested=90)
    assert (ledger.weights, ledger.activations, ledger.non_torch, ledger.available) == (0, 5, 0, 85)


def test_choose_blocks() -> None:
    """Oracle: blocks, bytes, or what the ledger leaves, rounded down."""
    assert choose_blocks(LEDGER, SHAPE) == 6 * GIB // SHAPE.block_bytes
    assert choose_blocks(LEDGER, SHAPE, num_blocks_override=3) == 3
    assert choose_blocks(LEDGER, SHAPE, cache_bytes_override=SHAPE.block_bytes * 5 - 1) == 4
    with pytest.raises(MemoryBudgetError, match="kv_cache_memory_bytes is 1; one block takes 32768"):
        choose_blocks(LEDGER, SHAPE, cache_bytes_override=1)


def test_nothing_left() -> None:
    """Oracle: the error for a negative remainder names every term and the remedies."""
    poor = MemoryLedger(
        total=8 * GIB, requested=7 * GIB, weights=6 * GIB, activations=GIB, non_torch=GIB, tables=0, cuda_graphs=0
    )
    with pytest.raises(MemoryBudgetError, match=r"7\.00 GiB requested, weights take 6\.00 GiB.*raise gpu_memory_util"):
        choose_blocks(poor, SHAPE)


def capacity(layout: KvLayout = ONE_GROUP, max_model_len: int = 160) -> KvCapacity:
    """In blocks of 16 tokens, with chunks of 16."""
    return KvCapacity(layout=layout, block_size=16, max_model_len=max_model_len, chunk_tokens=16)


def settle(blocks: list[int], holds: KvCapacity | None = None, *, is_override: bool = False) -> list[Any]:
    """``settle_blocks`` on one rank per number."""

    def settle_one(group: Agreeing) -> int:
        return settle_blocks(
            lambda: blocks[group.info.rank], group, SHAPE, holds or capacity(), is_override=is_override
        )

    return on_ranks(len(blocks), settle_one)


def test_settle_takes_the_smallest() -> None:
    """Oracle: every rank gets the minimum."""
    assert settle([40, 12, 90]) == [12, 12, 12]


def test_less_than_one_longest_request_is_refused_on_all_ranks() -> None:
    """By hand: 10 blocks hold max_model_len 160; for 9 the error has numbers and remedy."""
    assert settle([10, 11]) == [10, 10]
    results = settle([50, 9])
    assert all(isinstance(result, MemoryBudgetError) for result in results)
    assert "max_model_len 160 needs 10 KV blocks" in str(results[0])
    assert "lower max_model_len to at most 144" in str(results[0])
    assert str(results[0]) == str(results[1])


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 4), (16, 4), (17, 8), (208, 52), (224, 53), (225, 54), (1_000, 102)]
)
def test_blocks_of_a_sequence_with_windows(num_tokens: int, num_blocks: int) -> None:
    """Oracle: by hand.  A window of 48, a tile of 128 and a chunk of 16 are 12 blocks, and one more because they may
    begin within a block: beyond 13 blocks only the full layer takes more."""
    assert FOUR_GROUPS.blocks_for(num_tokens, 16, 16) == num_blocks
    assert ONE_GROUP.blocks_for(num_tokens, 16, 16) == -(-num_tokens // 16)


def test_what_a_cache_with_windows_holds() -> None:
    """Oracle: by hand.  A request of 1,000 tokens takes 102 blocks, so 306 hold three; 101 hold one of 992 tokens."""
    holds = capacity(FOUR_GROUPS, 1_000)
    assert (holds.blocks_per_request, holds.num_tokens(306), holds.num_tokens(51)) == (102, 3_000, 500)
    assert (holds.longest_request(102), holds.longest_request(101), holds.longest_request(3)) == (1_000, 992, 0)
    assert settle([102, 110], holds) == [102, 102]
    (error,) = settle([101], holds)
    assert "max_model_len 1000 needs 102 KV blocks" in str(error) and "max_model_len to at most 992" in str(error)


def test_an_override_in_blocks_may_be_small() -> None:
    """Oracle: two blocks on request are allowed, where memory for two alone would be refused."""
    assert settle([2, 2], is_override=True) == [2, 2]


def test_report(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a line, a table and JSON per rank, whose terms add up, and the three lines once; hosts are named.  A
    start shows the line of a host's first rank, and the three."""
    table = ledger_table(LEDGER, RankInfo(rank=3, world_size=4, local_rank=1, local_world_size=2))
    assert "Memory of rank 3 (host 1):" in table and "weights" in table and "60.00 GiB" in table
    info = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    line = ledger_json(LEDGER, info, num_blocks=7, kv_cache_bytes=7 * SHAPE.block_bytes)
    report = json.loads(line)
    terms = ("weights", "activations", "non_torch", "tables", "cuda_graphs", "kv_cache_available")
    spent = sum(report[name] for name in terms)
    assert "\n" not in line
    assert (report["rank"], report["host"], report["num_kv_blocks"], spent) == (1, 0, 7, report["requested"])
    with caplog.at_level(logging.DEBUG, logger="tp_engine"):
        for rank in range(2):
            info = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
            log_memory(LEDGER, SHAPE, capacity(), info, num_blocks=100)
    text = caplog.text
    expected = "72.00 of 80.00 GiB: weights 60.00, activations 3.00, non torch 2.00, kv cache 6.00"
    three = list(kv_cache_lines(num_bytes=100 * SHAPE.block_bytes, num_tokens=1600, max_model_len=160))
    assert text.count("Memory of rank") == text.count("memory: {") == 2
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        f"memory of rank 0: {expected}",
        *three,
    ]
    assert f"memory of rank 1: {expected}" in text
    assert text.count("GPU KV cache size: 1,600 tokens") == 1
    assert text.count("Maximum concurrency for 160 tokens per request: 10.00x") == 1
