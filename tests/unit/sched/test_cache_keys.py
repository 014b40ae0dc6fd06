"""CacheKeys of the prefix cache: which requests may share, in one process and over a restart."""

from __future__ import annotations

from itertools import product

import pytest

from tests.tiers import slow_but
from tests.unit.features.tiers.disk_tier_harness import DiskSimulation
from tests.unit.sched.scheduler_harness import RandomLoad, Simulation, limits
from tests.unit.sched.test_scheduler_properties import SHAPES
from tp_engine.features.lora.feature import AskedAdapter
from tp_engine.features.lora.scheduling import LoRASlots
from tp_engine.features.tiers.prefetch import Prefetcher
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.blocks.cache_keys import CacheKeys, Variant

GIVEN = limits(num_blocks=40, num_host_slots=32, num_disk_slots=64, max_model_len=64, max_loras=4)
PROMPT = list(range(1, 34))  # eight blocks of 4, and a token


def loaded(simulation: Simulation, generation: int) -> str:
    """The name of the adapter of this generation; those before it are loaded, too."""
    slots = simulation.scheduler.feature(LoRASlots)
    assert slots is not None
    while f"adapter {generation}" not in slots:
        number = slots.new_generation()
        slots.add(f"adapter {number}", number)
    return f"adapter {generation}"


def ask(simulation: Simulation, generation: int = 0, salt: str | None = None, **params: object) -> int:
    """Run one request alone; its cached tokens."""
    request_id = f"r{len(simulation.requests)}"
    params = {"seed": 1, "max_tokens": 2, "ignore_eos": True, "cache_salt": salt, **params}
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        extensions={"lora": AskedAdapter(name=loaded(simulation, generation))} if generation else {},
    )
    simulation.add_request(request)
    simulation.run()
    return max(delta.num_cached_tokens for delta in simulation.outputs[request_id, 0].deltas)


def test_with_the_defaults_a_root_is_the_salt() -> None:
    """Oracle: the promise, so that blocks on disk are found again."""
    assert [CacheKeys().of(salt) for salt in ("", "tenant")] == ["", "tenant"]
    assert CacheKeys([lambda cache_key: f"<{cache_key}>"]).of("tenant") == "<tenant>"


def test_no_two_cache_keys_are_equal() -> None:
    """Oracle: all combinations of salts, generations, versions and processes; among the salts are cache keys
    themselves."""
    processes = [CacheKeys(), CacheKeys()]
    salts = ["", "a", "\0", "0:", "1:1:a"]
    found = []
    for version in range(3):
        for cache_keys in processes:
            made = [cache_keys.of(salt, Variant(generation)) for salt, generation in product(salts, range(3))]
            found += made if version else [cache_key for cache_key in made if cache_key.startswith("\0")]
            salts += [cache_key for cache_key in made if cache_key not in salts][:2]
            cache_keys.renew([])
    assert len(set(found)) == len(found) > 100


def test_generations_separate_adapters() -> None:
    """By hand: 8 blocks of 4 are found by the same adapter alone, and each tenant has its own."""
    simulation = Simulation(limits(num_blocks=80, max_model_len=64, max_loras=4))
    cases = [(0, None), (1, None), (2, None), (1, "tenant"), (0, "tenant")]
    assert [ask(simulation, *case) for case in cases] == [0] * 5
    assert [ask(simulation, *case) for case in cases] == [32] * 5


@pytest.mark.parametrize("generation", [0, 1])
def test_a_restart_finds_blocks_of_the_model_alone(generation: int) -> None:
    """By hand: the next process finds all eight blocks of no adapter, and none of generation 1, which is another one
    there."""
    first = DiskSimulation(GIVEN)
    assert ask(first, generation) == 0
    first.flush()
    assert ask(first.restart(), generation) == (0 if generation else 32)


def test_sessions_belong_to_a_root() -> None:
    """By hand: a session of one adapter brings nothing back for another; each is known under its own."""
    simulation = DiskSimulation(GIVEN)
    ask(simulation, 1, prompt_cache_key="chat")
    prefetcher = simulation.scheduler.feature(Prefetcher)
    assert prefetcher is not None
    for generation, is_known in ((0, False), (2, False), (1, True)):
        simulation.scheduler.prefetch_session("chat", "", Variant(generation))
        assert prefetcher.has_work is is_known


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
def test_a_standstill_at_any_time(shape: str, ahead: int) -> None:
    """All rows are preempted and all cache keys renewed, again and again in a random load.  Oracle: the fake model on
    each sequence alone, the content of every slot, and the scheduler's own invariants."""
    simulation = Simulation(SHAPES[shape], ahead=ahead)
    load = RandomLoad(simulation, seed=3)
    for number in range(30):
        for _ in range(8):
            load.act()
        simulation.drain()
        simulation.scheduler.preempt_all()
        if number % 2:
            simulation.scheduler.renew_cache_keys()
        simulation.scheduler.check_integrity()
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions > 10


def test_a_kept_request_finds_its_blocks_unless_the_weights_have_changed() -> None:
    """By hand: chunks of 32 and 1 and a decode have computed 34 tokens; after a pause all but the eight full blocks are
    computed again, and behind new cache keys all."""
    for renews, num_again in ((False, 2), (True, 34)):
        simulation = Simulation(limits(num_blocks=80, max_model_len=64, max_loras=4))
        simulation.add(PROMPT, max_tokens=9, ignore_eos=True)
        for _ in range(3):
            simulation.step()
        simulation.scheduler.preempt_all()
        if renews:
            simulation.scheduler.renew_cache_keys()
        simulation.run()
        assert simulation.scheduler.stats().num_recomputed_tokens == num_again
