"""From the board's records to distributions: known times in, known buckets out."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tp_engine.engine.report import (
    EXPERT_LOAD,
    PLAN_BYTES,
    STEP_TIME_S,
    STEP_TOKENS,
    WAIT_S,
    Distribution,
    StepStatistics,
    expert_balance,
)
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import COLLECTIVE_WORD, MEMORY_LINES, NUM_RECORDS, PHASE_WORD, RankSlot
from tp_engine.job.progress import RankPhase, RankProgress

US = 1000  # nanoseconds


def write(
    slot: RankSlot, step: int, *, received: int, started: int, done: int, decodes: int = 1, prefill: int = 0
) -> None:
    """A record as a rank leaves it; times in microseconds, a plan of 200 bytes."""
    times = (received * US, started * US, started * US, done * US)
    slot.records[step % NUM_RECORDS] = (step, 200, decodes, prefill, *times, 0)
    slot.words[11] = step


def spread(bounds: tuple[float, ...], distribution: Distribution) -> dict[float, int]:
    """Counts by upper bound, without empty buckets."""
    assert len(distribution.counts) == len(bounds) + 1
    return {bound: count for bound, count in zip((*bounds, np.inf), distribution.counts, strict=True) if count}


def test_two_ranks_and_three_steps() -> None:
    """Oracle: worked out by hand from the times below (microseconds).

    Step 1 follows idleness (no decodes): rank 1 waits from its publication at 1000 until 1040.  Step 2 decodes: the
    ranks were free at 3000 and 2900, the plan comes at 3100 and 3150.  Step 3's plan was sent ahead, at 3200, and rank
    1 picks it up at once.
    """
    board = JobBoard.create(2)
    first, second = board.slots
    write(first, 1, received=1000, started=1100, done=3000, decodes=0, prefill=70)
    write(second, 1, received=1040, started=1050, done=2900, decodes=0, prefill=70)
    write(first, 2, received=3100, started=3200, done=5000, decodes=3)
    write(second, 2, received=3150, started=3160, done=5000, decodes=3)
    write(first, 3, received=3200, started=5010, done=6000, decodes=9)
    write(second, 3, received=5004, started=5015, done=6000, decodes=9)
    statistics = StepStatistics(board)
    statistics.update()
    one, two = statistics.rank_reports()
    assert (one.num_steps, two.num_steps, statistics.num_missed) == (3, 3, 0)
    assert spread(WAIT_S, one.plan_wait) == {1e-5: 2, 1e-4: 1}  # 0, 100, 0
    assert spread(WAIT_S, two.plan_wait) == {5e-5: 1, 5e-4: 1, 1e-5: 1}  # 40, 250, 4
    assert spread(STEP_TIME_S, one.step_time) == {0.002: 2, 0.001: 1}  # 1900, 1800, 990
    assert one.recent_step_s == pytest.approx([0.0019, 0.0018, 0.00099])
    assert one.step_time.total == pytest.approx(0.00469)
    assert spread(WAIT_S, one.collective_wait) == {1e-5: 3} and one.num_last == 2  # 0, 0, 5
    assert spread(WAIT_S, two.collective_wait) == {5e-5: 2, 1e-5: 1} and two.num_last == 1  # 50, 40, 0
    assert spread(WAIT_S, statistics.of_job["step_skew"]) == {5e-5: 2, 1e-5: 1}
    assert spread(PLAN_BYTES, statistics.of_job["plan_bytes"]) == {256: 3}
    assert spread(STEP_TOKENS, statistics.of_job["step_tokens"]) == {128: 1, 8: 1, 16: 1}
    assert statistics.of_job["step_tokens"].total == 82


def test_steps_are_counted_once_and_when_all_ranks_have_ended_them() -> None:
    """Oracle: rank 1 is a step behind; the same reports twice count nothing twice."""
    board = JobBoard.create(2)
    for step in range(1, 4):
        for slot in board.slots[: 1 if step == 3 else 2]:
            write(slot, step, received=step * 100, started=step * 100 + 1, done=step * 100 + 90)
    statistics = StepStatistics(board)
    for _ in range(3):
        statistics.update()
        assert sum(statistics.of_job["step_tokens"].counts) == 2
    write(board.slots[1], 3, received=300, started=301, done=390)
    statistics.update()
    assert sum(statistics.of_job["step_tokens"].counts) == 3
    assert [sum(rank.plan_wait.counts) for rank in statistics.rank_reports()] == [3, 3]


def test_what_was_written_over_is_missed() -> None:
    """Oracle: of 2000 steps the last 512 count, less a margin of 16 that may be overwritten meanwhile."""
    board = JobBoard.create(1)
    for step in range(1, 2001):
        write(board.slots[0], step, received=step * 100, started=step * 100 + 1, done=step * 100 + 90)
    statistics = StepStatistics(board)
    statistics.update()
    counted = sum(statistics.of_job["step_tokens"].counts)
    assert counted == NUM_RECORDS - 16 + 1 and statistics.num_missed == 2000 - counted
    assert not any(statistics.of_job["plan_bytes"].counts), "one rank: no plan is sent"
    assert len(statistics.rank_reports()[0].recent_step_s) == 32


def test_nothing_has_run() -> None:
    """Oracle: zeros, and the board's figures of the process itself."""
    board = JobBoard.create(1)
    slot = board.slots[0]
    slot.register()
    statistics = StepStatistics(board)
    statistics.update()
    (rank,) = statistics.rank_reports()
    assert (rank.pid, rank.state, rank.num_steps, rank.memory) == (os.getpid(), "starting", 0, {})
    assert not any(rank.step_time.counts) and rank.cpu_s > 0 and rank.resident_bytes > 1 << 20
    assert 0 <= rank.heartbeat_age_s < 60 and rank.collective_s == 0.0


def test_the_phases_of_the_start_are_on_the_board() -> None:
    """Oracle: the noted times, in the order of a start; phases that this rank did not have are absent."""
    slot = JobBoard.create(1).slots[0]
    assert slot.startup_s == {}
    slot.note_startup({"packing weights": 0.25, "loading weights": 1.5, "opening the device": 0.0})
    expected = {"opening the device": 1e-6, "loading weights": 1.5, "packing weights": 0.25}
    assert list(slot.startup_s) == list(expected) and slot.startup_s == pytest.approx(expected)
    assert slot.failure_text == "" and slot.memory == {}


def test_memory_and_collectives_are_on_the_board() -> None:
    """Oracle: the noted times; only time within steps counts."""
    slot = JobBoard.create(1).slots[0]
    lines = {name: number - 3 for number, name in enumerate(MEMORY_LINES)}
    slot.note_memory(lines)
    assert slot.memory == lines
    progress = RankProgress()
    progress.show_on(slot.words, PHASE_WORD, COLLECTIVE_WORD)
    progress.reach(RankPhase.LOAD)
    progress.collected(0)
    assert slot.collective_ns == 0
    progress.reach(RankPhase.STEP_BEGIN)
    progress.collected(0)
    first = slot.collective_ns
    progress.collected(0)
    assert 0 < first < slot.collective_ns


def test_how_evenly_tokens_go_to_experts() -> None:
    """Oracle: loads by hand; a layer that no token has reached yet is absent."""
    counts = [np.array([4, 0, 8, 4]), np.array([1, 1, 1, 1]), np.array([0, 0, 0, 0])]
    balance = expert_balance(counts)
    assert balance is not None and balance.largest_load == 2.0
    found = {bound: n for bound, n in zip((*EXPERT_LOAD, np.inf), balance.num_experts, strict=True) if n}
    assert found == {0.1: 1, 1.0: 6, 2.0: 1}
    assert expert_balance([]) is None and expert_balance(counts[2:]) is None
