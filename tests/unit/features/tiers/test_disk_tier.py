"""Whole lives of random loads with a disk tier, restarts included.

Oracle: the fake model on each sequence alone, the content of blocks and slots, and the scheduler's own invariants.
"""

from __future__ import annotations

import pytest

from tests.tiers import fast_first, slow_but
from tests.unit.features.tiers.disk_tier_harness import DiskSimulation
from tests.unit.features.tiers.host_tier_harness import Lag
from tests.unit.sched.scheduler_harness import RandomLoad, changed, limits
from tests.unit.sched.test_scheduler_properties import LAYOUTS, SCALE, SHAPES
from tp_engine.features.tiers.feature import STATS
from tp_engine.sched.scheduler import SchedulerLimits


def shape_of(given: SchedulerLimits, host: int, disk: int, moves: int = 4) -> SchedulerLimits:
    """With tiers of so many slots."""
    return changed(given, num_host_slots=host, num_disk_slots=disk, max_host_moves=moves)


@pytest.mark.parametrize(
    ("host", "disk", "ahead", "pace", "fails"),
    fast_first(
        1,
        [
            (20, 30, 1, 0.3, 0.1),
            (4, 10, 0, 0.5, 0.0),
            (20, 200, 1, 0.9, 0.0),
            (60, 400, 0, 0.05, 0.05),
            (8, 400, 2, 0.7, 0),
        ],
    ),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_load(shape: str, host: int, disk: int, ahead: int, pace: float, fails: float) -> None:
    """Oracle: as above; small and large tiers, fast and slow disks, failures, and two restarts."""
    simulation = DiskSimulation(
        shape_of(SHAPES[shape], host, disk), ahead=ahead, lag=Lag.RANDOM, pace=pace, fails=fails
    )
    for life in range(3 if SCALE > 1 else 2):
        load = RandomLoad(simulation, seed=len(shape) + ahead)  # the same prefixes in each life
        for _ in range(60 * SCALE):
            load.act()
        simulation.run()
        if life == 0:
            simulation.flush()
        simulation = simulation.restart()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_load_of_a_model_with_windows(layout: str, ahead: int) -> None:
    """Oracle: as above, in all groups of layers; the second life finds something."""
    simulation = DiskSimulation(shape_of(LAYOUTS[layout], 60, 400), ahead=ahead, fails=0.02)
    for _ in range(2):
        load = RandomLoad(simulation, seed=len(layout) + ahead)
        for _ in range(80 * SCALE):
            load.act()
        simulation.run()
        simulation.flush()
        simulation = simulation.restart()
    assert STATS.of(simulation.scheduler.stats()).num_used_disk_slots > 20


def test_reads_reach_the_hard_cases() -> None:
    """Oracle: counts: blocks each way, hits from disk, failures, parked sequences that were aborted."""
    simulation = DiskSimulation(shape_of(SHAPES["tight"], 20, 300), ahead=1, fails=0.02)
    load = RandomLoad(simulation, seed=1)
    for _ in range(800):
        load.act()
    simulation.run()
    stats = simulation.scheduler.stats()
    assert STATS.of(stats).num_disk_written_blocks > 200 and STATS.of(stats).num_disk_read_blocks > 50
    assert STATS.of(stats).num_disk_hit_tokens > 100 and STATS.of(stats).num_disk_failed_blocks > 3


def conversation(simulation: DiskSimulation, length: int, cache_salt: str | None = None) -> int:
    """Run one request of ``length`` prompt tokens alone; its cached tokens."""
    request = simulation.add(list(range(1, length + 1)), max_tokens=2, ignore_eos=True, cache_salt=cache_salt)
    simulation.run()
    return max(delta.num_cached_tokens for delta in simulation.outputs[request.request_id, 0].deltas)


def first_life(given: SchedulerLimits) -> DiskSimulation:
    """A process that has written the prefix of one conversation."""
    first = DiskSimulation(given)
    conversation(first, 33)
    first.flush()
    return first


def test_a_prefix_outlives_the_process() -> None:
    """By hand, blocks of 4: of 33 prompt tokens eight blocks are written, and read after a restart; nothing is read in
    the first life.  Other salts find nothing; an equal one does."""
    given = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64)
    first = DiskSimulation(given)
    assert conversation(first, 33) == conversation(first, 33, cache_salt="tenant") == 0
    first.flush()
    assert first.disk_worker.num_reads == 0 and first.disk_worker.num_writes == 16
    second = first.restart()
    assert conversation(second, 33, cache_salt="other") == 0
    assert conversation(second, 33) == 32 == second.disk_worker.num_reads * 4
    assert conversation(second, 33, cache_salt="tenant") == 32
    assert b"tenant" not in first.disk.journal.data


def test_sharers_share_one_read() -> None:
    """By hand: ten requests with one prefix of eight blocks on disk: eight reads, all of them hit."""
    given = limits(num_blocks=80, num_host_slots=32, num_disk_slots=64, max_model_len=64, max_num_seqs=16)
    first = first_life(given)
    second = DiskSimulation(given, disk=first.disk, pace=0.2)
    added = [second.add([*range(1, 33), 40 + index, 50], max_tokens=3) for index in range(10)]
    second.run()
    assert second.disk_worker.num_reads == 8
    cached = [second.outputs[one.request_id, 0].deltas[0].num_cached_tokens for one in added]
    assert cached == [32] * 10


def test_reads_begin_while_a_request_waits_for_a_row() -> None:
    """By hand: one row, which another request holds for 12 steps: the reads of the waiting one have ended by then, and
    it enters without waiting."""
    given = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64, max_num_seqs=1)
    first = first_life(given)
    second = first.restart()
    second.add([7] * 5, max_tokens=12, ignore_eos=True, request_id="runs")
    second.step()
    waiting = second.add(list(range(1, 34)), max_tokens=2, ignore_eos=True)
    for _ in range(10):
        second.step()
        assert second.waits.num_waiting == 0
    assert second.outputs["runs", 0].finish_reason is None and second.disk_worker.num_reads == 8
    second.run()
    assert second.outputs[waiting.request_id, 0].deltas[0].num_cached_tokens == 32
    assert STATS.of(second.scheduler.stats()).num_disk_hit_tokens == 32


def test_a_long_prefix_is_read_in_rounds_and_others_wait_for_room() -> None:
    """By hand: at most 4 * 2 reads at a time; two requests with 12 blocks each, which come together, find all of
    them."""
    given = limits(num_blocks=60, num_host_slots=64, num_disk_slots=64, max_model_len=64, max_host_moves=2)
    first = DiskSimulation(given)
    prompts = [list(range(start, start + 49)) for start in (1, 101)]
    for tokens in prompts:
        first.add(tokens, max_tokens=2, ignore_eos=True)
    first.run()
    first.flush()
    second = DiskSimulation(given, disk=first.disk, pace=0.3)
    added = [second.add(tokens, max_tokens=2, ignore_eos=True) for tokens in prompts]
    while second.scheduler.has_unfinished:
        second.step()
        ended = sum(reader().ended for name, reader in second.disk_worker.readers.items() if name == "disk_reads")
        assert second.disk_worker.num_reads - ended <= 8
    assert [second.outputs[one.request_id, 0].deltas[0].num_cached_tokens for one in added] == [48, 48]
    assert second.disk_worker.num_reads == 24


def test_a_stalled_disk_stops_nothing() -> None:
    """By hand: reads that never end; a request with its prefix there is computed after seconds, others at once."""
    given = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64)
    first = first_life(given)
    second = first.restart()
    second.disk_worker.is_stalled = True
    second.add(list(range(1, 34)), max_tokens=2, request_id="waits")
    other = second.add([7] * 20, max_tokens=8, request_id="other")
    for _ in range(8):
        second.step()
    assert second.outputs[other.request_id, 0].finish_reason is not None and second.now_s == 0
    second.run()
    assert 3 < second.now_s < 4
    assert conversation(second, 33) in (0, 32)  # not read, whatever the first one has left in the pool
    second.flush()  # ends although nothing is written
    assert second.scheduler.reset_prefix_cache()
    second.scheduler.check_integrity()


def test_a_reset_forgets_what_is_on_disk() -> None:
    """By hand: after a reset in the first or the second life nothing is found, and a new life has nothing either."""
    given = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64)
    first = first_life(given)
    second = first.restart()
    assert STATS.of(second.scheduler.stats()).num_used_disk_slots == 8
    assert second.scheduler.reset_prefix_cache()
    assert STATS.of(second.scheduler.stats()).num_used_disk_slots == 0
    assert conversation(second.restart(), 33) == 0


def test_a_parked_request_can_be_aborted() -> None:
    """By hand: its reads end without it, and the slots are those of the cached prefix."""
    given = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64)
    first = first_life(given)
    second = first.restart()
    second.disk_worker.is_stalled = True
    second.add(list(range(1, 34)), max_tokens=2, request_id="waits")
    second.step()  # a plan with the reads alone
    assert second.waits.num_waiting == 1 and second.scheduler.stats().num_waiting == 1
    second.abort("waits")
    second.disk_worker.is_stalled = False
    second.flush()
    assert conversation(second, 33) == 32 and second.disk_worker.num_reads == 8
