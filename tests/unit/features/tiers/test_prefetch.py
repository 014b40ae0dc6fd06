"""Blocks that come back from the host tier before the request for them may run.

Oracle: counts worked out by hand, and in every case the fake model and the content of blocks and slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.features.tiers.host_tier_harness import Lag, MaskedTierWorker, TierSimulation
from tests.unit.features.tiers.test_host_tier_cases import AHEAD, ENDLESS, LAGS, POOL, one_after_the_other, prompt
from tests.unit.sched.scheduler_harness import changed
from tests.unit.sched.test_scheduler_grammar import CONSTRAINED_SEEDS, GrammarSimulation
from tp_engine.features.tiers.feature import LOADS, STATS
from tp_engine.features.tiers.prefetch import Sessions

BUSY = changed(POOL, num_blocks=40, max_num_batched_tokens=8, max_host_moves=2)
NEXT = [*prompt(1, 33), 7, 7]


def busy_engine(lag: Lag = Lag.MOST, ahead: int = 0, **session: Any) -> TierSimulation:
    """The session has ended with 34 tokens, its 8 blocks are on the host, and a row decodes."""
    simulation = TierSimulation(BUSY, lag=lag, ahead=ahead)
    simulation.add(prompt(1, 33), max_tokens=2, **ENDLESS, **session)
    simulation.run()
    one_after_the_other(simulation, [2, 3, 4, 5, 6])
    simulation.add([9, 9, 9], max_tokens=36, **ENDLESS)
    simulation.step()
    return simulation


@LAGS
@AHEAD
def test_what_a_session_ended_with_comes_back_before_its_request(lag: Lag, ahead: int) -> None:
    """By hand: 8 blocks, of which 2 go out with a plan; the request then runs in the plan that admits it, without loads
    and without a wait.  Its 32 tokens count as found on the host."""
    simulation = busy_engine(lag, ahead, prompt_cache_key="chat")
    before, hits = len(simulation.plans), STATS.of(simulation.scheduler.stats()).num_host_hit_tokens
    simulation.scheduler.prefetch_session("chat", "")
    for _ in range(8):
        simulation.step()
    assert [len(LOADS.of(plan)) for plan in simulation.plans[before : before + 6]] == [0, 2, 2, 2, 2, 0]
    before = len(simulation.plans)
    simulation.add(NEXT, max_tokens=2, prompt_cache_key="chat", **ENDLESS)
    simulation.run()
    (entry,) = [plan for plan in simulation.plans[before:] if plan.admitted]
    assert entry.prefill_tokens.tolist() == [3] and not sum(len(LOADS.of(plan)) for plan in simulation.plans[before:])
    assert STATS.of(simulation.scheduler.stats()).num_host_hit_tokens - hits == 32


def test_without_a_hint_the_row_waits_for_its_loads() -> None:
    """By hand, the same request without one: it enters, and computes four plans later, when its 8 blocks are there."""
    simulation = busy_engine(prompt_cache_key="chat")
    simulation.add(NEXT, max_tokens=2, prompt_cache_key="chat", **ENDLESS)
    plans = [simulation.step() for _ in range(5)]
    assert [plan.prefill_tokens.tolist() for plan in plans if plan] == [[], [], [], [], [3]]
    simulation.run()


@pytest.mark.parametrize(("session", "salt"), [("another", ""), ("chat", "b"), ("", "")])
def test_unknown_sessions_change_nothing(session: str, salt: str) -> None:
    """Oracle: no loads for a name that no request had, or had with another salt."""
    simulation = busy_engine(prompt_cache_key="chat", cache_salt="a")
    before = len(simulation.plans)
    simulation.scheduler.prefetch_session(session, salt)
    simulation.run()
    assert not any(len(LOADS.of(plan)) for plan in simulation.plans[before:])


def test_a_session_has_the_salt_of_its_requests() -> None:
    """By hand: the 8 blocks of the salted session come back for its name and salt."""
    simulation = busy_engine(prompt_cache_key="chat", cache_salt="a")
    before = len(simulation.plans)
    simulation.scheduler.prefetch_session("chat", "a")
    simulation.run()
    assert sum(len(LOADS.of(plan)) for plan in simulation.plans[before:]) == 8


def test_a_hint_to_an_idle_engine_waits_for_the_next_plans() -> None:
    """By hand: nothing runs, so nothing moves; the next request's plans carry the loads."""
    simulation = TierSimulation(BUSY)
    simulation.add(prompt(1, 33), max_tokens=2, prompt_cache_key="chat", **ENDLESS)
    simulation.run()
    one_after_the_other(simulation, [2, 3, 4, 5, 6])
    simulation.scheduler.prefetch_session("chat", "")
    assert simulation.step() is None
    before = len(simulation.plans)
    simulation.add([9, 9, 9], max_tokens=8, **ENDLESS)
    simulation.run()
    assert sum(len(LOADS.of(plan)) for plan in simulation.plans[before:]) == 8


def test_hints_take_nothing_that_a_running_row_needs() -> None:
    """Oracle: a pool that the running row needs almost whole: it is not preempted, whatever is announced."""
    simulation = TierSimulation(changed(BUSY, num_blocks=10))
    for name in range(1, 9):
        simulation.add(prompt(name, 33), max_tokens=2, prompt_cache_key=f"chat {name}", **ENDLESS)
        simulation.run()
    simulation.add([9, 9, 9], max_tokens=36, **ENDLESS)
    for name in (*range(1, 9), *range(1, 9)):
        simulation.scheduler.prefetch_session(f"chat {name}", "")
        simulation.step()
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 0


def test_a_request_that_waits_for_its_grammar() -> None:
    """By hand: the 8 blocks come in while the grammar is compiled; then the request runs in the plan that admits it."""
    simulation = GrammarSimulation(BUSY, at_once=False)
    worker = simulation.worker = MaskedTierWorker(BUSY, Lag.MOST)
    for name in (1, 2, 3, 4, 5, 6):
        simulation.add(prompt(name, 33), max_tokens=2, **ENDLESS)
        simulation.run()
    simulation.add([9, 9, 9], max_tokens=36, **ENDLESS)
    simulation.step()
    loads = worker.num_loads
    request = simulation.add(prompt(1, 33), seed=CONSTRAINED_SEEDS, max_tokens=4)
    for _ in range(8):
        simulation.step()
    assert worker.num_loads - loads == 8
    before = len(simulation.plans)
    simulation.compiled(request.request_id)
    simulation.run()
    (entry,) = [plan for plan in simulation.plans[before:] if plan.admitted]
    assert entry.prefill_tokens.tolist() == [1] and worker.num_loads - loads == 8


def test_sessions_are_forgotten_in_order_of_use() -> None:
    """By hand: room for ten tokens."""
    sessions = Sessions(10)
    for name, length in (("a", 4), ("b", 4), ("a", 5), ("c", 1)):
        sessions.note((name, ""), np.zeros(length, dtype=np.int32))
    assert [sessions.last((name, "")) is not None for name in "abc"] == [True, True, True]
    sessions.note(("d", ""), np.zeros(2, dtype=np.int32))
    assert [sessions.last((name, "")) is not None for name in "abcd"] == [True, False, True, True]
    sessions.note(("e", ""), np.zeros(11, dtype=np.int32))
    assert all(sessions.last((name, "")) is None for name in "abcde")
