"""What each step schedules.  Oracle: plans worked out by hand; the fake worker checks that they are valid."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.unit.sched.scheduler_harness import Simulation, limits
from tp_engine.errors import RequestError
from tp_engine.plan import StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, FinishReason
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits

FOREVER: dict[str, Any] = {"ignore_eos": True, "max_tokens": None}


def shape(plan: StepPlan | None) -> tuple[list[int], list[tuple[int, int, bool]]]:
    """Decode rows, and (row, tokens, samples) of the prefills."""
    assert plan is not None
    prefills = zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), plan.prefill_samples.tolist(), strict=True)
    return plan.decode_rows.tolist(), list(prefills)


def test_golden_chunks_mix_with_decodes() -> None:
    """By hand, budget 8: 5 + 3 of 10 tokens; then 1 decode + 7; then both decode."""
    simulation = Simulation(limits(max_num_batched_tokens=8))
    simulation.add(list(range(5)), **FOREVER)
    simulation.add(list(range(10, 20)), **FOREVER)
    assert shape(simulation.step()) == ([], [(0, 5, True), (1, 3, False)])
    assert shape(simulation.step()) == ([0], [(1, 7, True)])
    assert shape(simulation.step()) == ([0, 1], [])


def test_golden_blocks_of_plans() -> None:
    """By hand, blocks of 4: a prompt of 7 holds 0 and 1; its 9th token needs block 2, one step after the 8th."""
    simulation = Simulation(limits())
    simulation.add(list(range(7)), **FOREVER)
    first = simulation.step()
    assert first is not None and first.admitted[0].block_ids.tolist() == [0, 1]
    assert first.admitted[0].num_computed_tokens == 0 and first.step_id == 1
    second, third = simulation.step(), simulation.step()
    assert second is not None and second.block_rows.tolist() == []
    assert third is not None
    assert (third.block_rows.tolist(), third.block_ids.tolist()) == ([0], [2])


def test_rows_are_released_by_the_next_plan_and_used_again() -> None:
    """By hand: one plan releases the row of a finished request and admits the next request to it."""
    simulation = Simulation(limits(max_num_seqs=1))
    simulation.add([1, 2], max_tokens=1)
    simulation.add([3, 4], max_tokens=1)
    first, second = simulation.step(), simulation.step()
    assert first is not None and first.released.tolist() == []
    assert second is not None and second.released.tolist() == [0] and second.admitted[0].row == 0
    assert simulation.step() is None and not simulation.scheduler.has_unfinished
    assert simulation.scheduler.next_step_id == 3


def test_a_plan_without_rows_takes_a_number() -> None:
    """By hand: orders to the ranks are plans without a result, between two steps; none while a step is in flight."""
    simulation = Simulation(limits())
    simulation.add([1, 2], **FOREVER)
    simulation.step()
    assert simulation.scheduler.skip_step() == 2 and simulation.scheduler.next_step_id == 3
    plan = simulation.scheduler.schedule()
    assert plan is not None and plan.step_id == 3
    with pytest.raises(AssertionError, match="a plan without rows"):
        simulation.scheduler.skip_step()


def test_budget_counts_uncached_tokens_only() -> None:
    """By hand, budget 8: with 12 of 16 tokens cached, the second request enters whole."""
    simulation = Simulation(limits(max_num_batched_tokens=8))
    simulation.add(list(range(16)), max_tokens=1)
    simulation.run()
    simulation.add(list(range(16)), max_tokens=1)
    plan = simulation.step()
    assert shape(plan) == ([], [(0, 4, True)])
    assert plan is not None and plan.admitted[0].num_computed_tokens == 12
    assert simulation.outputs["r1", 0].deltas[0].num_cached_tokens == 12


def test_more_decodes_than_budget_go_in_order() -> None:
    """By hand, budget 2 and 3 rows: the first two in order decode until they end, then the third."""
    simulation = Simulation(limits(max_num_batched_tokens=2))
    for priority in (1, 0, 0):
        simulation.add([1], priority=priority, max_tokens=3, ignore_eos=True)
    assert shape(simulation.step()) == ([], [(0, 1, True), (1, 1, True)])
    simulation.run()
    assert shape(simulation.plans[1])[0] == [0, 1]


def test_priority_then_arrival() -> None:
    """By definition: lower priority numbers first, equal ones by arrival."""
    simulation = Simulation(limits(max_num_seqs=1))
    for name, priority in (("c", 1), ("a", 0), ("d", 1), ("b", 0)):
        simulation.add([1, 2], request_id=name, priority=priority, max_tokens=1)
    simulation.run()
    order = [plan.admitted[0].sampling.seed for plan in simulation.plans]
    assert order == [1, 3, 0, 2]


def test_what_never_fits_is_refused_at_once() -> None:
    """The promise: a refusal with its code and the numbers, and unchanged state."""
    simulation = Simulation(limits(num_blocks=2))
    with pytest.raises(RequestError, match=r"9 tokens.*holds 8.*2 blocks of 4") as caught:
        simulation.add([1] * 9)
    assert caught.value.code == "context_length_exceeded"
    assert not simulation.scheduler.has_unfinished and simulation.step() is None
    simulation.add([1] * 8)
    simulation.run()


def test_duplicate_id_is_refused_while_in_use() -> None:
    """The promise: a refusal while the first lives, acceptance afterwards."""
    simulation = Simulation(limits())
    simulation.add([1], request_id="x", max_tokens=1)
    with pytest.raises(RequestError, match="'x' is in use"):
        simulation.add([1], request_id="x")
    simulation.run()
    simulation.add([1], request_id="x", max_tokens=1)
    simulation.run()


def test_end_of_the_pool_ends_with_length() -> None:
    """By hand: 2 blocks of 4 hold 8 tokens, so a sequence ends at 9; its last token is never computed."""
    simulation = Simulation(limits(num_blocks=2))
    simulation.add([1, 2, 3], **FOREVER)
    simulation.add([4, 5, 6], **FOREVER)
    simulation.run()
    for name in ("r0", "r1"):
        output = simulation.outputs[name, 0]
        assert len(output.token_ids) == 6 and output.finish_reason is FinishReason.LENGTH


def test_golden_preemption() -> None:
    """By hand, 4 blocks of 4: both rows hold 2 when the first needs a third; the later request is preempted."""
    simulation = Simulation(limits(num_blocks=4, enable_prefix_caching=False))
    simulation.add([1] * 8, max_tokens=2, ignore_eos=True)
    simulation.add([2] * 8, max_tokens=2, ignore_eos=True)
    assert shape(simulation.step()) == ([], [(0, 8, True), (1, 8, True)])
    second = simulation.step()
    assert shape(second) == ([0], [])
    assert second is not None and second.released.tolist() == [1]
    assert (second.block_rows.tolist(), second.block_ids.tolist()) == ([0], [2])
    third = simulation.step()
    assert shape(third) == ([], [(0, 9, True)])
    assert third is not None and third.admitted[0].num_prompt_tokens == 8
    stats = simulation.scheduler.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (1, 8)
    simulation.run()


def test_preempted_tokens_still_cached_are_not_recomputed() -> None:
    """By hand, as above with the cache: the victim lost block 2 to the first request; its head is hit again."""
    simulation = Simulation(limits(num_blocks=4))
    simulation.add([1] * 8, max_tokens=2, ignore_eos=True)
    simulation.add([2] * 8, max_tokens=2, ignore_eos=True)
    simulation.run()
    stats = simulation.scheduler.stats()
    assert stats.num_preemptions == 1 and stats.num_recomputed_tokens == 4
    assert stats.num_prefix_query_tokens == 16 and stats.num_prefix_hit_tokens == 0


def test_low_priority_is_preempted_first_and_finishes() -> None:
    """The promise: the early request of low priority is preempted, no request starves, all finish."""
    simulation = Simulation(limits(num_blocks=6))
    simulation.add([1] * 6, priority=5, max_tokens=12, ignore_eos=True)
    simulation.step()
    for _ in range(5):
        simulation.add([2] * 6, max_tokens=12, ignore_eos=True)
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions > 0


def test_abort_in_every_state() -> None:
    """The promise: an abort while waiting, prefilling, decoding, and between schedule and update gives one last
    record."""
    simulation = Simulation(limits(max_num_seqs=3, max_num_batched_tokens=8))
    for length in (2, 2, 20, 4):
        simulation.add([1] * length, **FOREVER)
    simulation.step()
    simulation.step(between=lambda: simulation.abort("r0"))
    simulation.abort("r3", "r2", "unknown", "r2")
    assert [simulation.outputs[f"r{i}", 0].finish_reason for i in (0, 2, 3)] == [FinishReason.ABORT] * 3
    assert (
        simulation.outputs["r3", 0].deltas[0].first_scheduled_s
        == 0.0
        < (simulation.outputs["r2", 0].deltas[0].first_scheduled_s)
    )
    assert simulation.scheduler.num_unfinished == 1
    simulation.abort("r1")
    assert simulation.step() is None
    simulation.check_idle()
    simulation.add([5], max_tokens=1)
    plan = simulation.step()
    assert plan is not None and sorted(plan.released.tolist()) == [0, 1, 2]


def test_golden_statistics() -> None:
    """By hand: 6 tokens in 2 blocks of 4 leave a fragmentation of 1/4; shared blocks count once."""
    simulation = Simulation(limits())
    simulation.add(list(range(6)), **FOREVER)
    simulation.step()
    stats = simulation.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_used_blocks) == (14, 0, 2)
    assert (stats.num_live_tokens, stats.fragmentation) == (6, 0.25)
    simulation.add(list(range(6)), **FOREVER)
    simulation.step()
    stats = simulation.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_live_tokens) == (3, 7 + 2)
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (12, 4)


def test_own_time_per_step_at_256_rows() -> None:
    """The goal of the project: rank 0's scheduling takes less than 1 ms of processor time per step at 256 running
    requests."""
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=8192, block_size=16, max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=512
        )
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for number in range(256):
        prompt = [number] * (33 + number % 16)
        scheduler.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    times = []
    for _ in range(200):
        start = time.thread_time()
        plan = scheduler.schedule()
        assert plan is not None
        result = StepResult(step_id=plan.step_id, token_ids=np.ones(len(plan.sampled_rows), dtype=np.int32))
        scheduler.update(plan, result)
        times.append(time.thread_time() - start)
    assert sorted(times)[len(times) // 2] < 1e-3
