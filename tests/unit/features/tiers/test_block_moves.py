"""Moves of blocks between the pool and the host tier: bytes, order, counters; CUDA streams are simulated."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.cpu.library import native_library
from tp_engine.features.tiers.block_moves import BlockMover, CudaMover, StoreReports, runs_of
from tp_engine.features.tiers.codecs.base import BlockCopy, Codec
from tp_engine.job.tier_progress import CHANNEL_WORDS, TierProgress, TierProgressReader
from tp_engine.kernels.kv_cache.block_codes import pair_ids
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.plan import NO_PAIRS, IntArray
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape

MakeMover = Callable[[torch.Tensor, torch.Tensor, Codec], BlockMover]

CPU = torch.device("cpu")
WINDOWS = {"one group": (None,) * 3, "three groups": (8, None, 8, 8, 8, None)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


def pairs(*listed: tuple[int, int]) -> IntArray:
    """Moves by hand."""
    return np.array(listed, dtype=np.int32).reshape(-1, 2)


def random_rows(count: int, num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Blocks or slots (count, num_bytes) uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, num_bytes), generator=generator, dtype=torch.uint8)


def mover_of(kind: MakeMover, pool: torch.Tensor, slots: torch.Tensor) -> BlockMover:
    """A mover that copies blocks as they are."""
    return kind(pool, slots, BlockCopy(pool.shape[1], "any"))


@pytest.fixture(params=["C", "PyTorch"])
def cpu_mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeMover:
    """The mover with the compiled copy, and without it."""
    if request.param == "PyTorch":
        monkeypatch.setattr("tp_engine.features.tiers.codecs.base.native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("no compiled kernels here")
    return BlockMover


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_block_comes_back_bit_by_bit(
    cpu_mover: MakeMover, dtype: torch.dtype, windows: tuple[int | None, ...], num_ranks: int
) -> None:
    """Oracle: all bytes of the blocks before, scales included, for every rank's share of the heads and every layout."""
    layout = lay_out([KvKind(window=window, num_kv_heads=4, head_dim=6) for window in windows], num_ranks)
    shape = KvCacheShape(layout=layout, block_size=4, dtype=dtype)
    blocks = KvBlocks.allocate(shape, 6, CPU)
    blocks.raw.copy_(random_rows(6, shape.block_bytes))
    before, slots = blocks.raw.clone(), torch.zeros(3, shape.block_bytes, dtype=torch.uint8)
    mover = mover_of(cpu_mover, blocks.raw, slots)
    mover.move(pairs((4, 0), (1, 2)), NO_PAIRS)
    assert torch.equal(slots[[0, 2]], before[[4, 1]]) and not slots[1].any()
    blocks.raw[[4, 1]] = 0
    mover.move(NO_PAIRS, pairs((2, 5), (0, 1)))
    expected = before.clone()
    expected[4], expected[5], expected[1] = 0, before[1], before[4]
    assert torch.equal(blocks.raw, expected)


def test_stores_of_a_plan_come_before_its_loads(cpu_mover: MakeMover) -> None:
    """Oracle: both by hand: a slot that is stored and loaded, and a block that is stored and overwritten."""
    pool, slots = random_rows(4, 10), random_rows(2, 10, 1)
    before, old_slots = pool.clone(), slots.clone()
    mover_of(cpu_mover, pool, slots).move(pairs((0, 0), (2, 1)), pairs((0, 3), (1, 0)))
    assert torch.equal(slots, before[[0, 2]]) and torch.equal(pool, before[[2, 1, 2, 0]])
    assert not torch.equal(slots, old_slots)


def test_large_blocks_are_copied_in_pieces(cpu_mover: MakeMover) -> None:
    """Oracle: bytes before; the size is no multiple of the pieces that threads share."""
    pool, slots = random_rows(2, 600_001), torch.zeros(2, 600_001, dtype=torch.uint8)
    mover_of(cpu_mover, pool, slots).move(pairs((1, 0), (0, 1)), NO_PAIRS)
    assert torch.equal(slots, pool[[1, 0]])


def test_counters(cpu_mover: MakeMover) -> None:
    """Oracle: bytes by hand; on a CPU a step waits for all moves."""
    mover = mover_of(cpu_mover, random_rows(4, 100), random_rows(4, 100))
    mover.move(pairs((0, 0), (1, 1), (2, 2)), pairs((1, 3)))
    mover.wait(1)
    found = mover.counters()
    mover.move(pairs((0, 0)), NO_PAIRS)  # no part of what was read before
    assert (found.stored_bytes, found.loaded_bytes) == (300, 100)
    assert found.store_s > 0 and found.load_s > 0 and found.wait_s == pytest.approx(found.store_s + found.load_s)


@pytest.mark.parametrize(
    ("stores", "loads"), [(pairs((4, 0)), NO_PAIRS), (pairs((0, 2)), NO_PAIRS), (NO_PAIRS, pairs((0, -1)))]
)
def test_ids_outside_are_our_fault(stores: IntArray, loads: IntArray) -> None:
    """Oracle: an assertion, before any byte is written."""
    if native_library() is None:
        pytest.skip("PyTorch checks its indices itself")
    pool, slots = random_rows(4, 10), random_rows(2, 10)
    before = pool.clone(), slots.clone()
    with pytest.raises(AssertionError):
        mover_of(BlockMover, pool, slots).move(stores, loads)
    assert torch.equal(pool, before[0]) and torch.equal(slots, before[1])


def test_neighbours_are_one_copy() -> None:
    """Oracle: the runs by hand."""
    assert list(runs_of(NO_PAIRS)) == []
    moves = pairs((3, 7), (4, 8), (5, 9), (6, 11), (7, 12), (2, 13), (9, 1))
    assert list(runs_of(moves)) == [(3, 7, 3), (6, 11, 2), (2, 13, 1), (9, 1, 1)]


@dataclass
class Machine:
    """Streams whose work runs in any order that their events allow, once ``run`` is called."""

    streams: list[Stream] = field(default_factory=list)
    capability: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        self.compute = self.current = Stream(self)

    def new_stream(self) -> Stream:
        """``torch.cuda.Stream``."""
        assert self.capability != (10, 3), "a second stream on B300"
        return Stream(self)

    def run(self, choose: Callable[[list[int]], int]) -> None:
        """Run everything; ``choose`` picks the next of the streams that can go on."""
        while any(stream.work for stream in self.streams):
            ready = [i for i, stream in enumerate(self.streams) if stream.is_ready]
            assert ready, "streams wait for each other"
            self.streams[choose(ready)].work.popleft()()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    """A queue of work; an item may be an event that must have happened."""

    def __init__(self, machine: Machine) -> None:
        self.work: deque[Any] = deque()
        machine.streams.append(self)

    @property
    def is_ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Wait) or self.work[0].event.happened)

    def wait_event(self, event: Event) -> None:
        self.work.append(Wait(event))


@dataclass
class Wait:
    """Work that can begin when ``event`` has happened."""

    event: Event

    def __call__(self) -> None:
        assert self.event.happened


class Event:
    """An event of a simulated stream."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.happened = False

    def record(self, stream: Stream) -> None:
        stream.work.append(self._happen)

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, later: Event) -> float:
        return 2.0 if self.happened and later.happened else float("nan")

    def _happen(self) -> None:
        self.happened = True


class SimulatedMover(CudaMover):
    """Its moves are work of the machine's current stream, one by one, so that other streams' work may come between.

    The staging area has room for ``num_staged`` blobs.
    """

    def __init__(
        self,
        machine: Machine,
        pool: torch.Tensor,
        slots: torch.Tensor,
        codec: Codec,
        reports: StoreReports | None = None,
        num_staged: int = 1,
    ) -> None:
        super().__init__(pool, slots, codec, reports)
        self._machine = machine
        if self._staging is not None:
            self._staging = self._staging[:num_staged].clone()

    def _copy(self, source: torch.Tensor, target: torch.Tensor, pairs: IntArray) -> None:  # type: ignore[override]
        copy = super()._copy
        for one in pairs:
            self._enqueue(lambda one=one: copy(source, target, one[np.newaxis]))  # type: ignore[misc]

    def _encode(self, pairs: IntArray) -> None:
        self._enqueue(partial(super()._encode, pairs))

    def _decode(self, pairs: IntArray) -> None:
        self._enqueue(partial(super()._decode, pairs))

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._machine.current.work.append(work)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What torch takes for its GPU's streams."""
    found = Machine()
    answers: dict[str, Any] = {
        "Stream": lambda _device: found.new_stream(),
        "Event": Event,
        "current_stream": lambda _device: found.current,
        "stream": found.on,
        "get_device_capability": lambda _device: found.capability,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return found


class Halves(Codec):
    """A codec whose blobs are the even bytes of a block; they come back as both."""

    def __init__(self, block_bytes: int) -> None:
        self.blob_bytes = block_bytes // 2

    def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> torch.Tensor | None:
        blocks, places = pair_ids(pairs, pool.device)
        blobs[places] = pool[blocks, ::2]
        return None

    def decode(self, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray) -> None:
        places, blocks = pair_ids(pairs, pool.device)
        pool[blocks] = blobs[places].repeat_interleave(2, 1)

    def fingerprint(self) -> bytes:
        return b""


def choices(name: str) -> Callable[[list[int]], int]:
    """Who goes first: always the compute stream, always the copies, or either."""
    if name.startswith("random"):
        rng = np.random.default_rng(int(name.split()[1]))
        return lambda ready: int(rng.choice(ready))
    return min if name == "compute first" else max


class Steps:
    """Random plans on a mover, and on one that makes everything at once; forward passes read and write blocks.

    As the scheduler does it, a plan waits for the last batch that moves a block which its forward pass touches.
    """

    def __init__(self, mover: BlockMover, pool: torch.Tensor, slots: torch.Tensor, seed: int) -> None:
        self.mover, self.pool, self.slots = mover, pool, slots
        self.last_batch = np.zeros(len(pool), dtype=np.int64)
        self.num_batches = 0
        self.rng = np.random.default_rng(seed)

    def step(self, launch: Callable[[Callable[[], None]], None], *, waits: bool = True) -> None:
        rng, num_blocks, num_slots = self.rng, len(self.pool), len(self.slots)
        count = int(rng.integers(0, 3))
        stores = np.stack((rng.permutation(num_blocks)[:count], rng.permutation(num_slots)[:count]), 1)
        count = int(rng.integers(0, 3))
        loads = np.stack((rng.permutation(num_slots)[:count], rng.permutation(num_blocks)[:count]), 1)
        touched, number = rng.permutation(num_blocks)[: int(rng.integers(1, 4))], int(rng.integers(1, 255))
        if len(stores) or len(loads):
            self.num_batches += 1
            self.mover.move(stores.astype(np.int32), loads.astype(np.int32))
            self.last_batch[stores[:, 0]] = self.last_batch[loads[:, 1]] = self.num_batches
        if waits and (batch := int(self.last_batch[touched].max())):
            self.mover.wait(batch)

        def forward() -> None:
            states = self.pool[touched]
            self.pool[touched] = states * 3 + states.roll(1, 0) + number

        launch(forward)


def outcome(machine: Machine, seed: int, order: str, *, waits: bool, codec: Codec) -> bool:
    """Whether 60 plans, all enqueued before anything runs, leave the bytes that they leave one after another."""
    results = []
    for simulated in (True, False):
        pool, slots = random_rows(6, 8, seed), random_rows(4, codec.blob_bytes, seed + 1)
        mover = SimulatedMover(machine, pool, slots, codec) if simulated else BlockMover(pool, slots, codec)
        steps = Steps(mover, pool, slots, seed)
        for _ in range(60):
            steps.step(machine.compute.work.append if simulated else lambda forward: forward(), waits=waits)
        if simulated:
            machine.run(choices(order))
        results.append((pool, slots))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


ORDERS = ("compute first", "copies first", *(f"random {seed}" for seed in range(10)))


@pytest.mark.parametrize("order", ORDERS)
def test_streams_leave_the_bytes_of_one_after_another(machine: Machine, order: str) -> None:
    """Oracle: moves and forward passes one after another; a late stream changes nothing, with a codec neither, whose
    staging area has room for a part of a plan's moves."""
    codecs: tuple[Codec, ...] = (BlockCopy(8, "any"), Halves(8))
    for seed, codec in itertools.product(range(5), codecs):
        assert outcome(machine, seed, order, waits=True, codec=codec)


def test_b300_moves_on_the_stream_of_its_steps(machine: Machine) -> None:
    """Oracle: bytes as one after another in any order of streams, of which the copies have none."""
    machine.capability = (10, 3)
    assert outcome(machine, 0, "random 0", waits=True, codec=BlockCopy(8, "any"))


@pytest.mark.parametrize("order", ORDERS)
def test_stores_are_reported_when_streams_have_made_them(
    machine: Machine, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand: nothing before the streams run, then every store in the order of the plans, of which the codec
    refuses the blocks with an odd first byte; a part of a plan's stores at a time fits into the staging area."""

    class Choosy(Halves):
        def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> torch.Tensor:
            super().encode(pool, blobs, pairs)
            return pool[pair_ids(pairs, pool.device)[0], 0] % 2 == 1

    make = torch.empty
    monkeypatch.setattr("torch.empty", lambda *sizes, pin_memory=False, **more: make(*sizes, **more))
    pool = torch.arange(6, dtype=torch.uint8).repeat(8, 1).T.contiguous()
    words = memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q")
    reports, reader = StoreReports(TierProgress(words)), TierProgressReader([words])
    slots = torch.zeros(6, 4, dtype=torch.uint8)
    mover = SimulatedMover(machine, pool, slots, Choosy(8), reports, num_staged=2)
    mover.move(pairs((1, 0), (2, 1), (3, 2)), NO_PAIRS)
    mover.move(pairs((4, 3)), pairs((1, 0)))
    mover.move(pairs((5, 4)), NO_PAIRS)
    reports.send()
    assert reader.poll() == (0, ())
    machine.run(choices(order))
    reports.send()
    assert reader.poll() == (5, (1, 3, 5)) and reports.num_open == 0


def test_without_waits_bytes_differ(machine: Machine) -> None:
    """The test above would see a step that does not wait."""
    assert not all(outcome(machine, seed, "compute first", waits=False, codec=BlockCopy(8, "any")) for seed in range(5))


@pytest.mark.parametrize("order", ORDERS)
def test_hazards(machine: Machine, order: str) -> None:
    """Oracle: the bytes by hand, for every order that the streams allow.

    A store of what the step before writes; a block that is reused while its store reads; a load over a block that an
    earlier step still reads; a step that needs a load; a slot that is reused while a load reads it.
    """
    pool = torch.arange(1, 5, dtype=torch.uint8).view(4, 1)
    slots, read = torch.tensor([[70], [71]], dtype=torch.uint8), []
    mover, compute = mover_of(partial(SimulatedMover, machine), pool, slots), machine.compute.work
    compute.append(lambda: pool[0].fill_(10))  # step 1 writes block 0, and reads block 1
    compute.append(lambda: read.append(int(pool[1])))
    mover.move(pairs((0, 0)), pairs((1, 1)))  # step 2 stores the former, loads over the latter
    compute.append(lambda: pool[3].fill_(40))  # and touches neither
    mover.move(NO_PAIRS, pairs((0, 2)))  # step 3 loads what step 2 stored, for itself,
    mover.wait(2)
    compute.append(lambda: read.extend(pool[:3].flatten().tolist()))
    compute.append(lambda: pool[0].fill_(11))  # and reuses the stored block
    mover.move(pairs((3, 0)), NO_PAIRS)  # step 4 reuses the slot that step 3 loads
    machine.run(choices(order))
    assert read == [2, 10, 71, 10]
    assert pool.flatten().tolist() == [11, 71, 10, 40] and slots.flatten().tolist() == [40, 71]


def test_counters_of_streams_count_what_has_ended(machine: Machine) -> None:
    """Oracle: bytes by hand, 2 ms for every span of the simulated clock; nothing before the streams have run."""
    mover = mover_of(partial(SimulatedMover, machine), random_rows(4, 100), random_rows(4, 100))
    mover.move(pairs((0, 0), (1, 1)), pairs((1, 3)))
    mover.wait(1)
    mover.wait(1)  # nothing more to wait for
    mover.move(pairs((2, 2)), NO_PAIRS)
    before = mover.counters()
    assert (before.stored_bytes, before.loaded_bytes, before.wait_s) == (0, 0, 0.0)
    machine.run(min)
    found = mover.counters()
    assert (found.stored_bytes, found.loaded_bytes) == (300, 100)
    assert (found.store_s, found.load_s, found.wait_s) == pytest.approx((0.004, 0.004, 0.002))
