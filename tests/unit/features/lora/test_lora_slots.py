"""Slots for adapters in the scheduler: which request gets one, which one waits, and what ranks are told."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.tiers import fast_first
from tests.unit.sched.scheduler_harness import Simulation, limits
from tp_engine.errors import RequestError
from tp_engine.features.lora.feature import DROPS, LOADS, ROWS, AskedAdapter
from tp_engine.features.lora.scheduling import PATIENCE, LoRASlots
from tp_engine.plan import StepPlan
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams

LIMITS = limits(max_loras=2, num_blocks=64)


def request(request_id: str, adapter: str, max_tokens: int = 3, prompt: int = 1) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    asked = {"lora": AskedAdapter(name=adapter)} if adapter else {}
    return EngineRequest(request_id=request_id, prompt_token_ids=[prompt, 2, 3], params=params, extensions=asked)


class Ranks:
    """What a rank knows of adapters, from plans alone; asserts that rows run with those that they came with."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.slots: dict[int, int] = {}
        self.of_row: dict[int, int] = {}
        self.num_loads = 0

    def apply(self, plan: StepPlan, expected: dict[int, int]) -> None:
        for generation, slot in LOADS.of(plan).tolist():
            assert generation in self.loaded and 1 <= slot <= 2
            self.slots[slot] = generation
            self.num_loads += 1
        self.loaded -= set(DROPS.of(plan).tolist())
        given = dict(ROWS.of(plan).tolist())
        assert given.keys() <= {admission.row for admission in plan.admitted}
        for admission in plan.admitted:
            self.of_row[admission.row] = given.get(admission.row, 0)
            generation = expected[int(admission.token_ids[0])]
            assert (self.slots[given[admission.row]] if admission.row in given else 0) == generation


def loaded(simulation: Simulation, ranks: Ranks, *names: str) -> LoRASlots:
    slots = simulation.scheduler.feature(LoRASlots)
    assert slots is not None
    for name in names:
        generation = slots.new_generation()
        ranks.loaded.add(generation)
        slots.add(name, generation)
    return slots


def test_the_longest_idle_adapter_gives_way() -> None:
    """Oracle: by hand, two slots: a, b, then a again, so that c takes the slot of b; the model alone needs none."""
    simulation, ranks = Simulation(LIMITS), Ranks()
    slots = loaded(simulation, ranks, "a", "b", "c")
    for name in ("a", "b", "", "a", "c"):
        simulation.add_request(request(f"r{len(simulation.requests)}", name))
        simulation.run()
    found = [LOADS.of(plan).tolist() for plan in simulation.plans if len(LOADS.of(plan))]
    assert found == [[[1, 1]], [[2, 2]], [[3, 2]]]
    assert slots.stats()["lora"].running == slots.stats()["lora"].waiting == ()
    simulation.check_idle()


def test_a_request_without_a_slot_is_passed_but_does_not_starve() -> None:
    """Oracle: by hand: while two long requests keep both slots, c waits and others of a pass it; a stream of such
    requests cannot keep it out for much longer than ``PATIENCE`` steps."""
    simulation, ranks = Simulation(LIMITS), Ranks()
    slots = loaded(simulation, ranks, "a", "b", "c")
    for number, name in enumerate(("a", "b")):
        simulation.add_request(request(f"long-{number}", name, max_tokens=20))
    simulation.step()
    simulation.add_request(request("waits", "c", max_tokens=1))
    simulation.add_request(request("passes", "a", max_tokens=2))
    for _ in range(5):
        simulation.step()
    assert simulation.outputs["passes", 0].finish_reason is not None
    assert simulation.outputs["waits", 0].finish_reason is None and slots.stats()["lora"].waiting == ("c",)
    num_steps = 0
    while simulation.outputs["waits", 0].finish_reason is None:
        for name in ("a", "b"):
            simulation.add_request(request(f"{name}{num_steps}", name, max_tokens=8))
        simulation.step()
        num_steps += 1
        assert num_steps < 2 * PATIENCE
    assert num_steps > PATIENCE // 2
    simulation.run()
    simulation.check_idle()


def test_names_stand_for_the_last_load() -> None:
    """Oracle: by hand: requests keep the generation that they came with; a retired one is dropped once, after the last
    of its requests, and an unknown name is refused."""
    simulation, ranks = Simulation(LIMITS), Ranks()
    slots = loaded(simulation, ranks, "a")
    simulation.add_request(request("old", "a", max_tokens=6))
    simulation.step()
    loaded(simulation, ranks, "a")
    simulation.add_request(request("new", "a", max_tokens=2))
    slots.retire("a")
    with pytest.raises(RequestError, match="no adapter is loaded under the name 'a'"):
        simulation.add_request(request("late", "a"))
    simulation.run()
    simulation.add_request(request("base", ""))
    simulation.run()
    loads = [load for plan in simulation.plans for load in LOADS.of(plan).tolist()]
    drops = [drop for plan in simulation.plans for drop in DROPS.of(plan).tolist()]
    assert loads == [[1, 1], [2, 2]] and sorted(drops) == [1, 2]
    simulation.check_idle()


@pytest.mark.parametrize("seed", fast_first(2, range(6)))
@pytest.mark.parametrize("ahead", [0, 1])
def test_random_loads(seed: int, ahead: int) -> None:
    """Oracle: a rank that applies the plans: every row runs with the generation of its request, whatever is loaded,
    reloaded, unloaded, aborted and preempted meanwhile; in the end all that was retired is dropped."""
    draw = random.Random(seed)
    few = dataclasses.replace(LIMITS, num_blocks=12, max_num_seqs=4)
    simulation, ranks = Simulation(few, ahead=ahead), Ranks()
    slots = loaded(simulation, ranks, "a", "b", "c", "d")
    expected: dict[int, int] = {}
    for number in range(150):
        name = draw.choice(["a", "b", "c", "d", ""])
        if draw.random() < 0.1 and name:
            loaded(simulation, ranks, name)
        if draw.random() < 0.6:
            one = request(f"r{number}", name, draw.randrange(1, 9), prompt=number)
            expected[number] = slots.variant(slots.resolve(one)).number
            simulation.add_request(one)
        if draw.random() < 0.05 and simulation.requests:
            simulation.abort(draw.choice([*simulation.requests]))
        simulation.step()
    simulation.run()
    expected[150] = 0
    simulation.add_request(request("last", "", prompt=150))
    simulation.run()
    for plan in simulation.plans:
        ranks.apply(plan, expected)
    assert len(ranks.loaded) == 4 and ranks.num_loads > 4
    simulation.check_idle()
