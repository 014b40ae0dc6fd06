"""Stores that ranks refuse: what a report does, and whole lives in which many are refused, and told late."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers import fast_first
from tests.unit.features.tiers.host_tier_harness import Lag, RefusingSimulation
from tests.unit.features.tiers.test_host_tier_cases import POOL, one_after_the_other
from tests.unit.sched.scheduler_harness import RandomLoad, changed
from tests.unit.sched.test_scheduler_properties import LAYOUTS, SCALE, SHAPES
from tp_engine.features.tiers.feature import STATS
from tp_engine.features.tiers.tier_channel import StoreChecks
from tp_engine.job.tier_progress import TierReport


def pairs(*listed: tuple[int, int]) -> np.ndarray:
    return np.array(listed, dtype=np.int32)


def test_slots_are_sure_when_all_ranks_have_them() -> None:
    """Oracle: by hand: number 2 fails; slot 4 has been stored into again, so that the report of number 3 is no news."""
    reports = [TierReport(0, ()), TierReport(3, (2,)), TierReport(4, ())]
    checks = StoreChecks(9, 6, {"stores": lambda: reports.pop(0)})
    assert checks.settle().tolist() == [] and len(reports) == 3  # nothing is open: nothing is asked
    slots = np.arange(6)
    checks.begin(np.array([0, 1, 4]))
    checks.order(pairs((5, 0), (6, 1), (7, 4)))
    assert checks.settle().tolist() == [] and not checks.are_sure(slots).any()
    checks.begin(np.array([4]))
    checks.order(pairs((8, 4)))
    assert checks.settle().tolist() == [1] and np.flatnonzero(checks.are_sure(slots)).tolist() == [0]
    assert checks.settle().tolist() == [] and np.flatnonzero(checks.are_sure(slots)).tolist() == [0, 4]
    assert checks.num_refused == 1


def test_content_that_is_forgotten_is_never_sure() -> None:
    """Oracle: a store that ends after ``clear`` says nothing of its slot."""
    checks = StoreChecks(9, 6, {"stores": lambda: TierReport(1, ())})
    checks.begin(np.array([3]))
    checks.order(pairs((5, 3)))
    checks.clear()
    assert checks.settle().tolist() == [] and not checks.are_sure(np.arange(6)).any()


@pytest.mark.parametrize(("one_in", "ahead", "lag"), fast_first(1, [(2, 1, Lag.MOST), (20, 0, Lag.RANDOM)]))
@pytest.mark.parametrize("shape", fast_first(3, ["tight", *LAYOUTS]))
def test_random_load(shape: str, one_in: int, ahead: int, lag: Lag) -> None:
    """Oracle: the fake model on each sequence alone, and the content of blocks: a slot whose store was refused, or not
    reported, is never loaded."""
    given = (SHAPES | LAYOUTS)[shape]
    simulation = RefusingSimulation(
        changed(given, num_host_slots=40, max_host_moves=3), ahead=ahead, lag=lag, one_in=one_in
    )
    load = RandomLoad(simulation, seed=len(shape) + ahead)
    for _ in range(200 * SCALE):
        load.act()
    simulation.run()
    worker, stats = simulation.refusing, simulation.scheduler.stats()
    assert worker.num_refused >= STATS.of(stats).num_refused_blocks
    assert worker.num_stores > 10


@pytest.mark.parametrize("lag", list(Lag))
def test_what_was_refused_is_computed_again(lag: Lag) -> None:
    """Oracle: hits: all without refusals, none if all stores are refused; refused blocks are stored once each."""
    few = RefusingSimulation(POOL, ahead=0, lag=lag, one_in=10**9)
    one_after_the_other(few, [1, 2, 3, 4, 5, 6])
    assert one_after_the_other(few, [1, 2, 3])[0] == 32
    none = RefusingSimulation(POOL, ahead=0, lag=lag, one_in=1)
    one_after_the_other(none, [1, 2, 3, 4, 5, 6])
    assert one_after_the_other(none, [1, 2, 3]) == [0, 0, 0]
    stats = none.scheduler.stats()
    assert none.tier_worker.num_loads == 0 and STATS.of(stats).num_refused_blocks > 20
    assert none.tier_worker.num_stores <= 9 * 8
