"""Whole lives of random loads.  Oracle: the fake model on each sequence alone, and the fake KV cache's own content."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.tiers import fast_first, slow_but
from tests.unit.sched.scheduler_harness import VOCABULARY, RandomLoad, Simulation, limits

SCALE = int(os.environ.get("TP_ENGINE_TEST_SCALE", "1"))

SHAPES = {
    "roomy": limits(num_blocks=64, max_num_batched_tokens=64),
    "tight": limits(num_blocks=12, max_num_batched_tokens=16),
    "tiny chunks": limits(num_blocks=10, max_num_batched_tokens=3, max_num_seqs=6),
    "block of one": limits(num_blocks=20, block_size=1, max_model_len=40),
    "two blocks": limits(num_blocks=2, block_size=4, max_model_len=64),
    "three blocks, two rows": limits(num_blocks=3, block_size=5, max_num_seqs=2),
    "eight blocks": limits(num_blocks=8, block_size=3, max_num_seqs=4),
    "short model": limits(num_blocks=30, max_model_len=17),
}

# Windows of the models' layers; kernels read from the start of a tile on.
LAYOUTS = {
    "window": limits(windows=(8,), num_blocks=9, tile_tokens=4),
    "window, no tiles, block of one": limits(windows=(5,), num_blocks=24, block_size=1, tile_tokens=1),
    "window of two": limits(windows=(2,), num_blocks=4, block_size=2, tile_tokens=1, max_num_batched_tokens=7),
    "window, large tiles": limits(windows=(3,), num_blocks=14, block_size=3, tile_tokens=16),
    "full and window": limits(windows=(None, 8), num_blocks=26, tile_tokens=4),
    "full and full": limits(windows=(None, None), num_blocks=26),
    "one in four": limits(windows=(None, 8, 8, 8), num_blocks=34, tile_tokens=8),
    "one in four, roomy": limits(windows=(None, 8, 8, 8), num_blocks=200, tile_tokens=4, max_num_batched_tokens=64),
    "two windows": limits(windows=(None, 8, 24), num_blocks=40, tile_tokens=8, max_num_batched_tokens=16),
    "two windows, none full": limits(windows=(4, 12), num_blocks=16, block_size=2, tile_tokens=2),
}


@pytest.mark.parametrize("ahead", slow_but([1], [0, 1, 2]))
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_load(shape: str, caching: bool, ahead: int) -> None:
    """Oracle: the model on each sequence alone, with and without the prefix cache, with and without plans ahead; all
    finish."""
    simulation = Simulation(replace(SHAPES[shape], enable_prefix_caching=caching), ahead=ahead)
    load = RandomLoad(simulation, seed=len(shape))
    for _ in range(800 * SCALE):
        load.act()
    simulation.run()
    stats = simulation.scheduler.stats()
    assert caching or stats.num_prefix_hit_tokens == 0
    assert stats.num_preemptions or SHAPES[shape].num_blocks >= 30


@pytest.mark.parametrize("ahead", slow_but([1], [0, 1, 2]))
@pytest.mark.parametrize("caching", fast_first(1, [True, False]), ids=["cache", "no cache"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_load_of_a_model_with_windows(layout: str, caching: bool, ahead: int) -> None:
    """Oracle: as above.  The fake cache is checked as far back as each group may read; other rows get the blocks
    behind."""
    shape = replace(LAYOUTS[layout], enable_prefix_caching=caching)
    simulation = Simulation(shape, ahead=ahead)
    load = RandomLoad(simulation, seed=len(layout) + ahead)
    for _ in range(400 * SCALE):
        load.act()
    simulation.run()
    assert (simulation.scheduler.stats().num_prefix_hit_tokens > 0) == caching


def test_loads_reach_the_hard_cases() -> None:
    """Oracle: counts: the loads above hit the cache, preempt and copy."""
    simulation = Simulation(SHAPES["tight"])
    load = RandomLoad(simulation, seed=1)
    for _ in range(1500):
        load.act()
    stats = simulation.scheduler.stats()
    assert stats.num_prefix_hit_tokens > 200
    assert stats.num_preemptions > 20
    assert stats.num_recomputed_tokens > 50
    assert sum(len(plan.copies) for plan in simulation.plans) > 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["window", "full and window", "one in four"])
def test_loads_reach_the_hard_cases_of_windows(layout: str) -> None:
    """Oracle: counts: requests enter without the blocks behind a window; sequences are preempted, tails and forks are
    copied in all groups."""
    simulation = Simulation(LAYOUTS[layout])
    load = RandomLoad(simulation, seed=1)
    for _ in range(1500):
        load.act()
    stats, windows = simulation.scheduler.stats(), simulation.limits.windows
    assert stats.num_prefix_hit_tokens > 100 and stats.num_preemptions > 20
    assert sum(len(plan.copies) for plan in simulation.plans) > 10 * len(windows)
    admissions = [admission for plan in simulation.plans for admission in plan.admitted]
    tables = [admission.block_ids.reshape(-1, len(windows)) for admission in admissions]
    assert sum((table[:2, -1] == 0).all() for table in tables if len(table) > 2) > 5


def test_same_load_gives_same_plans() -> None:
    """Oracle: two runs in one process make the same plans, field by field."""
    runs = []
    for _ in range(2):
        simulation = Simulation(SHAPES["tight"])
        load = RandomLoad(simulation, seed=9)
        for _ in range(300):
            load.act()
        runs.append([repr(plan) for plan in simulation.plans])
    assert runs[0] == runs[1]


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses and shrinks the acts, over a pool of 2 to 8 blocks for each group of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation: Simulation | None = None

    @precondition(lambda self: self.simulation is None)
    @rule(
        num_blocks=st.integers(2, 8),
        block_size=st.integers(1, 4),
        rows=st.integers(1, 4),
        budget=st.integers(1, 12),
        caching=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (8,), (1,), (None, 8), (None, 8, 3), (4, 9)]),
        tile=st.sampled_from([1, 2, 8]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        rows: int,
        budget: int,
        caching: bool,
        windows: tuple[int | None, ...],
        tile: int,
    ) -> None:
        self.simulation = Simulation(
            limits(
                num_blocks=num_blocks * len(windows),
                block_size=block_size,
                max_num_seqs=rows,
                max_num_batched_tokens=budget,
                max_model_len=24,
                enable_prefix_caching=caching,
                windows=windows,
                tile_tokens=tile,
            )
        )

    @precondition(lambda self: self.simulation is not None)
    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 23),
        priority=st.integers(-1, 1),
        n=st.integers(1, 3),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        salt=st.sampled_from([None, "s"]),
    )
    def add(self, stem: int, length: int, priority: int, n: int, max_tokens: int | None, salt: str | None) -> None:
        assert self.simulation is not None
        length = min(length, self.simulation.limits.capacity_tokens)
        rng = random.Random(stem)
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        self.simulation.add(prompt, priority=priority, n=n, max_tokens=max_tokens, cache_salt=salt)

    @precondition(lambda self: self.simulation is not None)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        assert self.simulation is not None
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation is not None and self.simulation.requests)
    @rule(data=st.data(), between=st.booleans())
    def abort(self, data: st.DataObject, between: bool) -> None:
        assert self.simulation is not None
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        if between:
            simulation = self.simulation
            simulation.step(between=lambda: simulation.abort(request_id))
        else:
            self.simulation.abort(request_id)

    def teardown(self) -> None:
        if self.simulation is not None:
            self.simulation.run(max_steps=20_000)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60 * SCALE,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
