"""Steady steps, noted now and entered later, give the plans, outputs and end state of steps that are entered at once.

Oracle: the same scheduler with ``SteadySteps`` switched off, field by field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.tiers import fast_first, slow_but
from tests.unit.sched.scheduler_harness import RandomLoad, Simulation, limits
from tp_engine.plan import StepPlan, StepResult
from tp_engine.requests.request import StepOutput
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.steady_steps import SteadySteps

BLOCK_SIZES = [1, 3, 16, 64]


class Counted:
    """How many steps took each half of the steady path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.results = 0
        plan, take = SteadySteps.schedule, SteadySteps.update

        def counted_plan(steady: SteadySteps, step_id: int) -> StepPlan | None:
            made = plan(steady, step_id)
            self.plans += made is not None
            return made

        def counted_take(steady: SteadySteps, made: StepPlan, result: StepResult) -> StepOutput | None:
            output = take(steady, made, result)
            self.results += output is not None
            return output

        monkeypatch.setattr(SteadySteps, "schedule", counted_plan)
        monkeypatch.setattr(SteadySteps, "update", counted_take)


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no step steady."""
    monkeypatch.setattr(SteadySteps, "schedule", lambda self, step_id: None)
    monkeypatch.setattr(SteadySteps, "update", lambda self, plan, result: None)


def both_ways(run: Callable[[], Simulation]) -> tuple[Simulation, Simulation, Counted]:
    """The same run with steady steps and without, and the number of steady steps."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        steady = run()
    with pytest.MonkeyPatch.context() as patch:
        off(patch)
        plain = run()
    return steady, plain, counted


def assert_same(steady: Simulation, plain: Simulation) -> None:
    """Compare plans, outputs, tables and tokens."""
    assert len(steady.plans) == len(plain.plans)
    for ours, theirs in zip(steady.plans, plain.plans, strict=True):
        for name in StepPlan.__struct_fields__:
            one, other = getattr(ours, name), getattr(theirs, name)
            assert is_same(one, other), f"step {theirs.step_id}, {name}: {one}, and {other}"
    assert {key: one.token_ids for key, one in steady.outputs.items()} == {
        key: one.token_ids for key, one in plain.outputs.items()
    }
    assert steady.scheduler.stats() == plain.scheduler.stats()


def is_same(one: Any, other: Any) -> bool:
    """Whether both are equal, arrays and what holds arrays too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return all(is_same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("ahead", slow_but([1], [0, 1, 2]))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_rows_of_many_lengths_decode_as_ever(block_size: int, ahead: int) -> None:
    """Oracle: the plain run; seven rows, each at another place in its block; some end by length, some by a stop
    token."""
    shape = limits(num_blocks=2000 // block_size, block_size=block_size, max_model_len=260, max_num_seqs=8)

    def run() -> Simulation:
        simulation = Simulation(shape, ahead=ahead)
        for number in range(7):
            prompt = [(5 * number + place) % 50 for place in range(1 + 3 * number)]
            simulation.add(prompt, ignore_eos=number % 3 != 0, max_tokens=60 + 20 * number)
        simulation.run()
        return simulation

    steady, plain, counted = both_ways(run)
    assert_same(steady, plain)
    assert counted.plans > 100 and counted.results > 100


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8, 24)], ids=str)
@pytest.mark.parametrize("seed", fast_first(1, range(4)))
def test_random_loads_are_planned_as_ever(seed: int, windows: tuple[int | None, ...]) -> None:
    """Oracle: the plain run; arrivals, forks, aborts, preemptions between steady runs; windows release the same
    blocks."""

    def run() -> Simulation:
        shape = limits(
            num_blocks=40 * len(windows), max_num_batched_tokens=48, max_model_len=200, max_num_seqs=6, windows=windows,
            tile_tokens=8,
        )  # fmt: skip
        simulation = Simulation(shape, ahead=seed % 3)
        load = RandomLoad(simulation, seed=seed)
        for _ in range(600):
            load.act()
        simulation.run()
        return simulation

    steady, plain, counted = both_ways(run)
    assert_same(steady, plain)
    assert counted.plans > (50 if windows == (None,) else 15)


def started(shape: SchedulerLimits, *, ahead: int = 0) -> Simulation:
    """Three rows in the middle of a run, with steps noted."""
    simulation = Simulation(shape, ahead=ahead, checks=False)
    for number in range(3):
        simulation.add([number + 1, 2, 3, 4, 5][: 3 + number], ignore_eos=True, max_tokens=100)
    for _ in range(20):
        simulation.step()
    run = simulation.scheduler.state.rows.run
    assert run is not None and run.num_planned
    return simulation


SHAPE = limits(num_blocks=100, block_size=16, max_model_len=120, max_num_seqs=4)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_look_in_the_middle_sees_everything(ahead: int) -> None:
    """Oracle: counters, the view and the integrity check include the steps that are only noted."""
    simulation = started(SHAPE, ahead=ahead)
    known = sum(len(output.token_ids) for output in simulation.outputs.values())
    stats = simulation.scheduler.stats()
    assert stats.num_live_tokens == 3 + 4 + 5 + known - 3  # the newest of each has no K/V yet
    simulation.scheduler.check_integrity()
    simulation.run()


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_abort_in_the_middle_keeps_what_is_known(ahead: int) -> None:
    """Oracle: the row leaves with all its tokens: a request that continues them finds its blocks."""
    simulation = started(SHAPE, ahead=ahead)
    tokens = simulation.outputs["r1", 0].token_ids
    simulation.abort("r1")
    follow_up = simulation.requests["r1"].prompt_token_ids + tokens
    simulation.add(follow_up, max_tokens=3, ignore_eos=True)
    simulation.run()
    assert simulation.scheduler.stats().num_prefix_hit_tokens == (len(follow_up) - 1) // 16 * 16


def test_the_workers_memory_may_be_used_again() -> None:
    """Oracle: a result's array belongs to the worker, which soon puts the next step's tokens there."""
    simulation = Simulation(SHAPE, checks=False)
    simulation.add([1, 2, 3], ignore_eos=True, max_tokens=40)
    memory = np.empty(1, dtype=np.int32)
    execute = simulation.worker.execute

    def reusing(plan: StepPlan) -> StepResult:
        memory[:] = execute(plan).token_ids
        return StepResult(step_id=plan.step_id, token_ids=memory)

    simulation.worker.execute = reusing  # type: ignore[method-assign]
    simulation.run()
    simulation.add([1, 2, 3, *simulation.outputs["r0", 0].token_ids], ignore_eos=True, max_tokens=2)
    simulation.run()
    assert simulation.scheduler.stats().num_prefix_hit_tokens == 32
