"""Rank 0's report of a running job of two ranks: both ranks' steps, waits and memory, and the pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.frontend import wait_until
from tp_engine import LLM, SamplingParams
from tp_engine.ipc.rank_slot import MEMORY_LINES
from tp_engine.job.flight_recorder.record import FlightRecord
from tp_engine.job.flight_recorder.steps import parts_of
from tp_engine.sched.view import ViewLimits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

NOT_SPENT = ("total", "requested", "kv_cache_available", "kv_cache")


def test_a_report_of_two_ranks(checkpoint: Callable[..., Path]) -> None:
    """Oracle: 20 prompt tokens in chunks of 8 and 12 generated tokens: 3 + 11 steps on both ranks, 31 tokens in all.
    The memory ledger adds up to the log's figure; each rank's start has its phases; a second report counts nothing
    twice."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 32,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 64,
    }
    with LLM(str(checkpoint("qwen3")), tensor_parallel_size=2, device="cpu", dtype="float32", **options) as llm:
        llm.generate([list(range(5, 25))], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert llm.allocation_monitor.latest is not None
        assert llm.allocation_monitor.summary().peak_usage > 0
        # Rank 1 may end the last step shortly after rank 0 has its result.
        wait_until(lambda: sum(llm.engine.report().step_tokens.counts) >= 14, "both ranks to end 14 steps")
        report = llm.engine.report(ViewLimits())
        assert [rank.rank for rank in report.ranks] == [0, 1] and report.num_missed_steps == 0
        assert {rank.state for rank in report.ranks} == {"ready"} and len({rank.pid for rank in report.ranks}) == 2
        assert report.step_tokens.total == 31 and sum(report.step_tokens.counts) == 14
        assert sum(report.plan_bytes.counts) == sum(report.step_skew.counts) == 14
        assert sum(rank.num_last for rank in report.ranks) == 14
        for rank in report.ranks:
            assert rank.num_steps == 14 and len(rank.recent_step_s) == 14
            for spread in (rank.step_time, rank.plan_wait, rank.collective_wait):
                assert sum(spread.counts) == 14
            assert 0 < rank.collective_s < rank.step_time.total and rank.resident_bytes > 0 and rank.cpu_s > 0
            assert {"loading weights", "packing weights", "profiling memory"} < rank.startup_s.keys()
            assert all(taken_s > 0 for taken_s in rank.startup_s.values())
            memory = rank.memory
            assert memory.keys() == set(MEMORY_LINES) and memory["weights"] > 0
            spent = sum(size for line, size in memory.items() if line not in NOT_SPENT)
            assert memory["kv_cache_available"] == memory["requested"] - spent
            assert memory["kv_cache"] == report.ranks[0].memory["kv_cache"] > 0
        waits = sum(rank.collective_wait.total for rank in report.ranks)
        assert waits == pytest.approx(report.step_skew.total)
        steps = parts_of(msgspec.convert(llm.engine.act("flight_record"), FlightRecord))
        assert [*steps] == [*range(1, 15)] and all([part.rank for part in one] == [0, 1] for one in steps.values())
        assert [one[0].step.prefill_tokens for one in steps.values()][:4] == [8, 8, 4, 0]
        assert report.view is not None and report.view.grid.num_blocks == 32 and not report.view.running
