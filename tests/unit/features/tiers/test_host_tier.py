"""Whole lives of random loads with a host tier.

Oracle: the fake model on each sequence alone, the content of blocks and slots, and the scheduler's own invariants.
"""

from __future__ import annotations

import pytest

from tests.soak.schedules import many_moves
from tests.tiers import fast_first, slow_but
from tests.unit.features.tiers.host_tier_harness import Lag, MaskedTierWorker, TierSimulation
from tests.unit.sched.scheduler_harness import RandomLoad, changed, limits
from tests.unit.sched.test_scheduler_grammar import GrammarSimulation, MixedLoad
from tests.unit.sched.test_scheduler_properties import LAYOUTS, SCALE, SHAPES
from tp_engine.features.structured_output.feature import MASK_ROWS
from tp_engine.features.tiers.feature import STATS


@pytest.mark.parametrize(
    ("num_slots", "moves", "ahead", "lag"),
    fast_first(
        2,
        [
            (3, 1, 1, Lag.MOST),
            (60, 3, 2, Lag.RANDOM),
            (1, 8, 0, Lag.RANDOM),
            (40, 2, 1, Lag.NONE),
            (40, 2, 1, Lag.MOST),
            (400, 64, 0, Lag.MOST),
            (400, 64, 1, Lag.MOST),
        ],
    ),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_load(shape: str, num_slots: int, moves: int, ahead: int, lag: Lag) -> None:
    """Oracle: as above; tiny and roomy tiers, few and many moves in a plan, plans ahead, moves early and late."""
    simulation = TierSimulation(
        changed(SHAPES[shape], num_host_slots=num_slots, max_host_moves=moves), ahead=ahead, lag=lag
    )
    load = RandomLoad(simulation, seed=len(shape) + ahead)
    for _ in range(250 * SCALE):
        load.act()
    simulation.run()


@pytest.mark.slow
@pytest.mark.parametrize("lag", slow_but([Lag.RANDOM], [Lag.MOST, Lag.RANDOM]))
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_load_of_a_model_with_windows(layout: str, ahead: int, lag: Lag) -> None:
    """Oracle: as above, in all groups of layers."""
    shape = changed(LAYOUTS[layout], num_host_slots=60, max_host_moves=3)
    simulation = TierSimulation(shape, ahead=ahead, lag=lag)
    load = RandomLoad(simulation, seed=len(layout) + ahead)
    for _ in range(250 * SCALE):
        load.act()
    simulation.run()


@pytest.mark.parametrize("lag", [Lag.NONE, Lag.RANDOM])
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
@pytest.mark.parametrize("num_slots", [5, 100])
def test_random_mixtures_with_grammars(num_slots: int, ahead: int, lag: Lag) -> None:
    """Oracle: the grammar and the fake model; rows wait for tokens, others for loads, and all end."""
    given = limits(num_blocks=12, max_num_batched_tokens=9, num_host_slots=num_slots, max_host_moves=2)
    simulation = GrammarSimulation(given, ahead=ahead)
    worker = simulation.worker = MaskedTierWorker(given, lag)
    load = MixedLoad(simulation, num_slots)
    for _ in range(400 * SCALE):
        load.act()
    simulation.run()
    assert any(len(MASK_ROWS.of(plan)) for plan in simulation.plans)
    assert worker.num_loads > 10


def test_loads_reach_the_hard_cases() -> None:
    """Oracle: counts: moves each way, waits of plans for them, rows that are preempted, blocks that are dropped."""
    simulation = TierSimulation(changed(SHAPES["tight"], num_host_slots=60, max_host_moves=2), ahead=1)
    load = RandomLoad(simulation, seed=1)
    for _ in range(1500):
        load.act()
    simulation.run()
    stats, worker = simulation.scheduler.stats(), simulation.tier_worker
    assert worker.num_loads == STATS.of(stats).num_loaded_blocks > 150
    assert STATS.of(stats).num_stored_blocks >= worker.num_stores > 300  # some were overwritten in the same plan
    assert worker.num_waits > 300 and stats.num_preemptions > 20 and STATS.of(stats).num_dropped_blocks > 20
    assert STATS.of(stats).num_host_hit_tokens > 200


@pytest.mark.slow
def test_many_moves() -> None:
    """Oracle: as above.  ``scripts/soak`` moves 100,000 blocks in this way, in other schedules each time."""
    count = many_moves(2000 * SCALE, seed=4)
    assert count["loaded blocks"] > 200 and count["waits for moves"] > 200
    assert count["preemptions in schedules"] > 40 and count["masked rows"] > 200
