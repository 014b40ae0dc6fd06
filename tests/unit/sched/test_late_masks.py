"""Masks that come late: other rows' steps go on, and the tokens are those that they are with masks at once.

The clock is a count: a mask is there once ``advance`` has been called as often as its place in the grammar says, or
once a gate is open.  Oracle of tokens: the grammar and the fake model on each sequence alone (``GrammarSimulation``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from tests.masks import FoundMasks
from tests.tiers import slow_but
from tests.unit.features.speculation.test_speculation import PROPOSERS, ScriptedSource
from tests.unit.sched.scheduler_harness import limits
from tests.unit.sched.test_scheduler_grammar import (
    CONSTRAINED_SEEDS,
    FakeConstraint,
    GrammarSimulation,
    MixedLoad,
    constrain,
    fill_masks,
)
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.structured_output.constraint import follow, masks_of
from tp_engine.features.structured_output.feature import MASK_ROWS
from tp_engine.features.structured_output.scheduling import ConstrainedRows
from tp_engine.plan import StepPlan
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler import SchedulerLimits


class LateMasks(FoundMasks):
    """``delay`` is by the tokens of a place; a mask that was not asked for never comes."""

    def __init__(self, delay: Callable[[list[int]], int]) -> None:
        super().__init__(fill_masks)
        self._delay, self._due, self._now, self.num_late = delay, dict[bytes, int](), 0, 0

    def ask(self, constraints: Iterable[Any]) -> None:
        for one in constraints:
            self._due.setdefault(bytes(one.generated), self._now + self._delay(one.generated))

    def is_ready(self, constraint: Any) -> bool:
        is_ready = self._due.get(bytes(constraint.generated), self._now + 1) <= self._now
        self.num_late += not is_ready
        return is_ready

    def advance(self) -> None:
        self._now += 1


class LateSimulation(GrammarSimulation):
    """A step may have nothing to run: then the masks are waited for."""

    masks: LateMasks

    def __init__(self, given: SchedulerLimits, delay: Callable[[list[int]], int], **options: Any) -> None:
        super().__init__(given, masks=LateMasks(delay), **options)

    def step(self, between: Callable[[], None] | None = None) -> StepPlan | None:
        self.masks.advance()
        while not self.in_flight and self.scheduler.has_unfinished:
            made = self.scheduler.schedule()
            if made is not None:
                self.plans.append(made)
                self.in_flight.append(made)
            else:
                self.masks.advance()
                self._check()
        return super().step(between)


def at_random(most: int) -> Callable[[list[int]], int]:
    """Up to ``most`` rounds, many of none."""
    return lambda generated: max(0, zlib.crc32(bytes(generated), 9) % (2 * most) - most)


class Gate:
    """A mask of the sequences that have generated ``at`` tokens hangs until the gate is open."""

    def __init__(self, at: int) -> None:
        self.at, self.is_open = at, False

    def __call__(self, generated: list[int]) -> int:
        return 10**9 if len(generated) == self.at and not self.is_open else 0

    def open(self, simulation: LateSimulation) -> None:
        """Let them come."""
        self.is_open = True
        simulation.masks._due.clear()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_blocks": 8, "max_num_batched_tokens": 5, "max_model_len": 30}, {"max_num_batched_tokens": 7}],
    ids=["room", "preemption", "chunks"],
)
def test_late_masks_change_no_token(changes: dict[str, int], ahead: int) -> None:
    """Oracle: see above; chunks, forks, copies, preemption, the prefix cache, stops, aborts, plans ahead."""
    simulation = LateSimulation(limits(**changes), at_random(6), ahead=ahead)
    load = MixedLoad(simulation, 1)
    for _ in range(100):
        load.act()
    simulation.run()
    assert simulation.masks.num_late > 10
    assert simulation.scheduler.stats().num_preemptions > 0 or "num_blocks" not in changes


@pytest.mark.parametrize("kind", slow_but(["partly right"], PROPOSERS))
def test_draft_tokens_whose_masks_are_late_are_left_out(kind: str) -> None:
    """Oracle: see above; some draft tokens have a mask, and some that the grammar takes have none."""
    source = ScriptedSource(PROPOSERS[kind])
    given = limits(speculation=SpeculativeConfig(num_speculative_tokens=5, max_step_rows=16))
    source.simulation = simulation = LateSimulation(given, at_random(2), proposer=source)
    load = MixedLoad(simulation, 0)
    for _ in range(80):
        load.act()
    simulation.run()
    assert simulation.masks.num_late > 10
    assert any((MASK_ROWS.of(plan) >= given.max_num_seqs).any() for plan in simulation.plans)
    copies = follow(FakeConstraint(), [min(t for t in range(50) if FakeConstraint().accept(t))])
    assert [len(one) for one in masks_of([copies], LateMasks(lambda _: 1))] == [0]
    assert [len(one) for one in masks_of([copies], LateMasks(lambda _: 0))] == [1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_mask_that_hangs_holds_up_nobody(ahead: int) -> None:
    """Oracle: by hand: while five of six rows wait, each plan has the sixth, and no other; then the tokens."""
    gate = Gate(at=2)
    simulation = LateSimulation(limits(num_blocks=64), gate, ahead=ahead)
    plain = simulation.add([1, 2, 3], ignore_eos=True, max_tokens=40)
    for number in range(5):
        simulation.add([4, 5, 6 + number], seed=CONSTRAINED_SEEDS + 16 * number, max_tokens=6)
    while simulation.scheduler.state.rows.readiness.num_with(np.arange(8, dtype=np.int32), Blocked.MASK) < 5:
        simulation.step()
    simulation.drain()
    begun, before = len(simulation.plans), len(simulation.outputs[plain.request_id, 0].token_ids)
    for _ in range(12):
        simulation.step()
    simulation.drain()
    assert all(len(plan.decode_rows) == 1 for plan in simulation.plans[begun:])
    assert len(simulation.outputs[plain.request_id, 0].token_ids) == before + len(simulation.plans) - begun >= 12
    gate.open(simulation)
    simulation.run()


def waiting(simulation: LateSimulation) -> int:
    return simulation.scheduler.state.num_parked


def test_a_row_is_preempted_while_its_mask_hangs() -> None:
    """Oracle: by hand: it waits beside the queue until the mask is there, and others enter; then its tokens."""
    gate = Gate(at=2)
    simulation = LateSimulation(limits(num_blocks=64), gate)
    simulation.add([4, 5, 6], seed=CONSTRAINED_SEEDS, max_tokens=6)
    other = simulation.add([1, 2, 3], ignore_eos=True, max_tokens=20)
    for _ in range(4):
        simulation.step()
    simulation.scheduler.preempt_all()
    assert waiting(simulation) == 1 and len(simulation.scheduler.state.waiting) == 1
    simulation.scheduler.check_integrity()
    for _ in range(4):
        simulation.step()
    assert len(simulation.outputs[other.request_id, 0].token_ids) == 8 and waiting(simulation) == 1
    gate.open(simulation)
    simulation.step()
    assert waiting(simulation) == 0
    simulation.run()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_is_aborted_while_its_mask_hangs(is_preempted: bool) -> None:
    """Oracle: nothing is left of it, in a row or beside the queue; a request of its name gets its own tokens."""
    gate = Gate(at=2)
    simulation = LateSimulation(limits(), gate)
    simulation.add([4, 5, 6], request_id="gone", seed=CONSTRAINED_SEEDS, max_tokens=6, n=2)
    for _ in range(2):
        simulation.step()
    if is_preempted:
        simulation.scheduler.preempt_all()
    simulation.abort("gone")
    rows = simulation.scheduler.feature(ConstrainedRows)
    assert rows is not None and not rows._late and not simulation.scheduler.has_unfinished
    simulation.check_idle()
    gate.open(simulation)
    simulation.add([4, 5, 7], request_id="gone", seed=CONSTRAINED_SEEDS + 16, max_tokens=6)
    simulation.run()


def test_first_masks_that_hang_keep_nobody_out() -> None:
    """Oracle: by hand: more requests, and copies, than may be passed over in a step wait beside the queue; one behind
    them enters at once.  Each copy is made behind the one before it."""
    gate = Gate(at=0)
    simulation = LateSimulation(limits(num_blocks=64), gate)
    for number in range(40):
        simulation.add([4, 5, 6 + number % 8], seed=CONSTRAINED_SEEDS + 16 * number, max_tokens=3, n=2)
    behind = simulation.add([1, 2, 3], ignore_eos=True, max_tokens=3)
    for _ in range(3):
        simulation.step()
    assert len(simulation.outputs[behind.request_id, 0].token_ids) == 3
    assert waiting(simulation) == 40 and simulation.scheduler.schedule() is None
    assert simulation.scheduler.stats().num_waiting == 80
    gate.open(simulation)
    simulation.run()


def test_a_copy_whose_first_mask_hangs_waits_alone() -> None:
    """Oracle: by hand: the first copy's mask was there, the next one's is not, which a grammar that is the same for all
    does not do; the request ends whole."""

    class Slow(FakeConstraint):
        num_made = 0

    class SlowGrammar:
        def start(self, *, ignore_eos: bool) -> FakeConstraint:
            Slow.num_made += 1
            if Slow.num_made == 2:
                simulation.masks._due.clear()
                simulation.masks._delay = lambda generated: 3 if not generated else 0
            return Slow()

    simulation = LateSimulation(limits(), lambda _: 0, at_once=False)
    request = simulation.add([1, 2, 3], seed=CONSTRAINED_SEEDS, n=3, max_tokens=4)
    constrain(simulation.scheduler, request.request_id, SlowGrammar())
    simulation.scheduler.schedule()
    assert waiting(simulation) == 1 and simulation.scheduler.state.num_unmade == 1
    simulation.scheduler.check_integrity()
