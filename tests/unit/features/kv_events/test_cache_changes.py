"""KV events of random loads.  Oracle: what a lookup in the prefix cache finds of every sequence that there was."""

from __future__ import annotations

import random
import time
from collections import deque

import numpy as np
import pytest

from tests.kv_events import Block, Subscriber, plain_hashes
from tests.tiers import slow_but
from tests.unit.features.tiers.disk_tier_harness import DiskSimulation
from tests.unit.features.tiers.host_tier_harness import Lag, RefusingSimulation, TierSimulation
from tests.unit.sched.scheduler_harness import RandomLoad, Simulation, changed, limits, tiers_of
from tests.unit.sched.test_scheduler_properties import LAYOUTS, SCALE, SHAPES
from tp_engine.features.kv_events.feature import KVEventCounters
from tp_engine.features.kv_events.mirror import BlockStored, CacheMirror, encode
from tp_engine.features.kv_events.scheduling import CacheChange, Rebuilt
from tp_engine.features.lora.feature import AskedAdapter
from tp_engine.features.lora.scheduling import LoRASlots
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import SchedulerLimits

SIZE = 4


class Wire:
    """A queue of ``room`` changes, the mirror behind it, and a subscriber; ``drain`` is the publisher's turn."""

    def __init__(self, size: int = SIZE, room: int = 1 << 30, *, publish_salted: bool = False) -> None:
        self.publish_salted = publish_salted
        self.mirror, self.subscriber = CacheMirror(size), Subscriber(size)
        self.waiting: deque[CacheChange] = deque()
        self.num_gaps = 0
        self._room = room

    def put(self, change: CacheChange) -> bool:
        """See ``KVEventSink``."""
        if len(self.waiting) >= self._room:
            return False
        self.waiting.append(change)
        return True

    def replace(self, change: Rebuilt) -> None:
        """See ``KVEventSink``."""
        self.num_gaps += 1
        self.waiting = deque([change])

    def counters(self) -> KVEventCounters:
        """See ``KVEventSink``."""
        return KVEventCounters()

    def drain(self) -> None:
        """Publish what waits."""
        events = self.mirror.events(self.waiting)
        self.waiting.clear()
        if events:
            self.subscriber.take(encode(time.time(), events, as_arrays=False))


Sequences = set[tuple[str, tuple[int, ...]]]


def sequences_of(simulation: Simulation) -> Sequences:
    """Salt and tokens of each sequence, as far as it has come."""
    return {
        (
            simulation.requests[request_id].params.cache_salt or "",
            (*simulation.requests[request_id].prompt_token_ids, *output.token_ids),
        )
        for (request_id, _), output in simulation.outputs.items()
    }


def found_in(simulation: Simulation, sequences: Sequences, *, salted: bool) -> set[tuple[str, Block]]:
    """What the prefix cache finds of them, block by block, with the medium of the slowest part that counts."""
    given, cache = simulation.limits, simulation.scheduler.state.blocks.cache
    is_full = given.kv_windows.is_full
    counted = is_full if is_full.any() else np.ones_like(is_full)
    found = set()
    for salt, tokens in sequences:
        if salt and not salted:
            continue
        key = simulation.scheduler._cache_keys.of(salt)
        blocks, _ = cache.match(key, np.array(tokens, dtype=np.int32).tobytes(), 1 << 30)
        for number, last in enumerate(blocks[:, counted].max(axis=1).tolist()):
            above_disk = given.num_blocks + tiers_of(given).num_host_slots
            medium = "GPU" if last < given.num_blocks else "CPU" if last < above_disk else "STORAGE"
            found.add((medium, Block(tokens[: (number + 1) * given.block_size], salt)))
    return found


def check(simulation: Simulation, wire: Wire, earlier: Sequences = frozenset()) -> None:  # type: ignore[assignment]
    """The subscriber knows what the cache holds, no more and no less."""
    wire.drain()
    sequences = sequences_of(simulation) | earlier
    assert wire.subscriber.content() == found_in(simulation, sequences, salted=wire.publish_salted)


def run_random(simulation: Simulation, wire: Wire, seed: int, acts: int, earlier: Sequences | None = None) -> None:
    """A random load, in which the publisher has its turn now and then, and the content is compared."""
    load, draws = RandomLoad(simulation, seed=seed), random.Random(seed)
    for _ in range(acts):
        load.act()
        if draws.random() < 0.2:
            check(simulation, wire, earlier or set())
        elif draws.random() < 0.1:
            simulation.scheduler.preempt_all() if not simulation.in_flight else None
    simulation.run()
    check(simulation, wire, earlier or set())


@pytest.mark.parametrize("salted", [False, True])
@pytest.mark.parametrize("shape", slow_but(["tight", "block of one"], SHAPES))
def test_random_load(shape: str, salted: bool) -> None:
    """Oracle: as above; evictions, resets, forks, beams' tails, preemptions."""
    wire = Wire(SHAPES[shape].block_size, publish_salted=salted)
    simulation = Simulation(SHAPES[shape], ahead=len(shape) % 2, kv_events=wire)
    run_random(simulation, wire, len(shape), 120 * SCALE)
    assert wire.subscriber.num_stored > 20 and wire.subscriber.num_removed > 5


@pytest.mark.parametrize("room", [1, 7])
def test_a_full_queue_leaves_the_truth(room: int) -> None:
    """Oracle: as above; a queue of ``room`` changes is full all the time, and each gap ends with the whole cache."""
    wire = Wire(room=room)
    simulation = Simulation(SHAPES["tight"], kv_events=wire)
    run_random(simulation, wire, room, 150 * SCALE)
    assert wire.num_gaps > 20


@pytest.mark.parametrize("layout", slow_but(["one in four", "window of two"], LAYOUTS))
def test_random_load_of_a_model_with_windows(layout: str) -> None:
    """Oracle: as above; what fills a gap of a group with a window is no event."""
    wire = Wire(LAYOUTS[layout].block_size)
    simulation = TierSimulation(host(LAYOUTS[layout], 20), kv_events=wire)
    if LAYOUTS[layout].kv_windows.has_full:
        run_random(simulation, wire, len(layout), 100 * SCALE)
        assert wire.subscriber.media["CPU"] or wire.subscriber.num_removed
    else:  # where a block is has no meaning for a run whose blocks come and go
        load = RandomLoad(simulation, seed=1)
        for _ in range(100 * SCALE):
            load.act()
        wire.drain()
        known = {block for _, block in found_in(simulation, sequences_of(simulation), salted=False)}
        assert {block for _, block in wire.subscriber.content()} == known


def host(given: SchedulerLimits, num_slots: int) -> SchedulerLimits:
    """With a host tier."""
    return changed(given, num_host_slots=num_slots, max_host_moves=4)


@pytest.mark.parametrize("shape", slow_but(["tight"], SHAPES))
def test_random_load_with_a_host_tier(shape: str) -> None:
    """Oracle: as above, with the medium of each block."""
    wire = Wire(SHAPES[shape].block_size)
    simulation = TierSimulation(host(SHAPES[shape], 20), ahead=1, lag=Lag.RANDOM, kv_events=wire)
    run_random(simulation, wire, len(shape), 120 * SCALE)


def test_stores_that_ranks_refuse() -> None:
    """Oracle: as above; slots that a rank refused leave the cache later."""
    wire = Wire()
    simulation = RefusingSimulation(host(SHAPES["tight"], 20), ahead=1, lag=Lag.RANDOM, one_in=4, kv_events=wire)
    run_random(simulation, wire, 5, 200 * SCALE)
    assert simulation.refusing.num_refused > 5


@pytest.mark.parametrize("fails", slow_but([0.1], [0.0, 0.1]))
def test_random_load_with_a_disk_tier(fails: float) -> None:
    """Oracle: as above, over two restarts; the first message of a start has what the disk kept."""
    given = changed(SHAPES["tight"], num_host_slots=20, num_disk_slots=60, max_host_moves=4)
    wire = Wire()
    simulation = DiskSimulation(given, ahead=1, lag=Lag.RANDOM, fails=fails, kv_events=wire)
    earlier: Sequences = set()
    for _ in range(3):
        check(simulation, wire, earlier)
        run_random(simulation, wire, 3, 100 * SCALE, earlier)
        simulation.flush()
        check(simulation, wire, earlier)
        earlier |= sequences_of(simulation)
        wire = Wire()
        simulation = simulation.restart(wire)
    assert len(wire.waiting) == 1 and earlier


POET = {"lora": AskedAdapter(name="poet")}


def ask(simulation: Simulation, prompt: list[int], **changes: object) -> None:
    """Run one request alone."""
    salt = changes.pop("salt", None)
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=1, cache_salt=salt)  # type: ignore[arg-type]
    request_id = f"r{len(simulation.requests)}"
    simulation.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **changes)  # type: ignore[arg-type]
    )
    simulation.run()


def test_new_weights_clear_all() -> None:
    """By hand: after an update nothing is known, also if the whole cache is told again; then the prompt's two blocks
    are, under the same hashes."""
    wire = Wire()
    simulation = Simulation(limits(), kv_events=wire)
    prompt = list(range(1, 10))
    ask(simulation, prompt)
    wire.drain()
    assert {block.token_ids for _, block in wire.subscriber.content()} == {(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)}
    simulation.scheduler.renew_cache_keys()
    wire.drain()
    assert not wire.subscriber.content()
    ask(simulation, prompt)
    wire.drain()
    assert sorted(wire.subscriber.blocks) == sorted(plain_hashes(prompt, SIZE))


def test_adapters_are_apart_until_they_leave() -> None:
    """By hand: an adapter's blocks have its name, and leave when it is unloaded or replaced; those of requests that
    still have it are not told."""
    wire = Wire(publish_salted=True)
    simulation = Simulation(limits(num_blocks=40, max_loras=2), kv_events=wire)
    slots = simulation.scheduler.feature(LoRASlots)
    assert slots is not None
    prompt, whole = list(range(1, 10)), tuple(range(1, 9))
    slots.add("poet", slots.new_generation())
    ask(simulation, prompt)
    ask(simulation, prompt, extensions=POET)
    ask(simulation, prompt, extensions=POET, salt="s")
    wire.drain()
    found = {(block.salt, block.adapter) for _, block in wire.subscriber.content() if block.token_ids == whole}
    assert found == {("", ""), ("", "poet"), ("s", "poet")}
    slots.add("poet", slots.new_generation())
    wire.drain()
    assert {block.adapter for _, block in wire.subscriber.content()} == {""}
    simulation.add([*prompt, 1, 2, 3, 4], max_tokens=1)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
    simulation.add_request(EngineRequest(request_id="late", prompt_token_ids=prompt, extensions=POET, params=params))
    slots.retire("poet")
    simulation.run()
    wire.drain()
    assert {block.adapter for _, block in wire.subscriber.content()} == {""}


def test_what_follows_an_evicted_block_leaves_with_it() -> None:
    """By hand: 3 equals 0 and is not cached, so 4 follows 0; once 0 is gone, 4 is not found although it is there."""
    wire, given = Wire(), limits(num_blocks=8)
    cache = Simulation(given, kv_events=wire).scheduler.state.blocks.cache
    data = np.arange(1, 9, dtype=np.int32).tobytes()
    ids = np.array([[0], [3], [4]])
    cache.insert(ids[:1], "", data[:16])
    cache.insert(ids[1:], "", data)
    cache.evict(np.array([0]))
    wire.drain()
    assert not wire.subscriber.content() and wire.subscriber.num_stored == 2
    cache.evict(np.array([4]))
    assert not wire.mirror.events(wire.waiting)


def test_blocks_with_images_are_not_told() -> None:
    """By hand: of 4 blocks the first two hold text alone; a run behind the others is not told, and leaves silently."""
    wire, given = Wire(), limits(num_blocks=12)
    cache = Simulation(given, kv_events=wire).scheduler.state.blocks.cache
    tokens = np.arange(1, 25, dtype=np.int32)
    tokens[10:13] = -2
    ids = np.arange(6)[:, None]
    cache.insert(ids[:4], "", tokens[:16].tobytes())
    cache.insert(ids, "", tokens.tobytes())
    wire.drain()
    told = {block.token_ids for _, block in wire.subscriber.content()}
    assert told == {tuple(range(1, 5)), tuple(range(1, 9))}
    for block in range(5, -1, -1):
        cache.evict(np.array([block]))
    wire.drain()
    assert not wire.subscriber.content() and wire.subscriber.num_stored == 2


def test_hashes_are_known() -> None:
    """Oracle: values computed once with another program (coreutils' sha256sum)."""
    mirror, wire = CacheMirror(SIZE), Wire()
    simulation = Simulation(limits(), kv_events=wire)
    ask(simulation, list(range(9)))
    stored = [one for one in mirror.events(wire.waiting) if isinstance(one, BlockStored)]
    assert [one for event in stored for one in event.block_hashes] == [KNOWN_FIRST, KNOWN_SECOND]
    assert plain_hashes(list(range(8)), SIZE) == [KNOWN_FIRST, KNOWN_SECOND]


KNOWN_FIRST = 0x3A8D3DA15BC356AE
KNOWN_SECOND = 0x1B46421931D0827
