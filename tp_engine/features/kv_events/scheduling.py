"""KV events, the scheduler's half: each change of what the prefix cache holds goes to a queue, whose other end makes
events of it and publishes them.

::

    PrefixCache --- observer ---> KVEvents ---> KVEventSink (a bounded queue) ---> a thread: hashes, events, sockets

A change is a few references to what the cache has anyway, so a step pays for a queue's entry and no more.  If the queue
is full, all that waits in it is forgotten, and a ``Rebuilt`` with the whole cache takes its place: the queue always
leads to the truth, and never holds up a step.

The cache's content is the logical blocks that a prompt of a new request may find, by what comes before them.  Not
among them are those of salted prompts, unless they are asked for, of old weights and of adapters that were unloaded.
Of groups of layers only those that keep all blocks count, if there are any.  A block in several groups is as far away
as its farthest part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.features.kv_events.feature import COUNTERS, KVEventCounters
from tp_engine.features.lora.scheduling import LoRASlots
from tp_engine.features.registry import find_half
from tp_engine.features.tiers.feature import LIMITS, TierLimits
from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.cache_keys import CacheKey
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import Identity, PrefixCache, Run
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.limits import SchedulerLimits

Tiers: TypeAlias = npt.NDArray[np.uint8]
"""Where each of some logical blocks is, (n,): 0 the pool, 1 the host tier, 2 the disk tier."""


class Inserted(msgspec.Struct, frozen=True, gc=False):
    """``length`` logical blocks that follow each other and ``parent``, their identities from ``serial`` on.
    ``token_bytes`` has their token ids, and perhaps more.  ``tiers`` None: all are in the pool."""

    serial: int
    parent: Identity
    length: int
    token_bytes: bytes
    tiers: Tiers | None


class Shortened(msgspec.Struct, frozen=True, gc=False):
    """Of those inserted under ``serial`` the first ``length`` are left."""

    serial: int
    length: int


class Moved(msgspec.Struct, frozen=True, gc=False):
    """The blocks with these ``numbers`` (n,), of those inserted under ``serial``, are in ``tiers`` now."""

    serial: int
    numbers: BlockIds
    tiers: Tiers
    token_bytes: bytes


class Retired(msgspec.Struct, frozen=True, gc=False):
    """An adapter's generation has left."""

    generation: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is left."""


class Rebuilt(msgspec.Struct, frozen=True, gc=False):
    """All that there is now.  ``is_behind_gap``: changes before it were lost."""

    runs: list[Inserted]
    is_behind_gap: bool


CacheChange: TypeAlias = Inserted | Shortened | Moved | Retired | Cleared | Rebuilt


class KVEventSink(Protocol):
    """Takes changes in order; neither call waits."""

    publish_salted: bool

    def put(self, change: CacheChange) -> bool:
        """Take a change; False, and it is not taken, if the queue is full."""

    def replace(self, change: Rebuilt) -> None:
        """Forget what waits in the queue, and take this."""

    def counters(self) -> KVEventCounters:
        """Return what happened so far."""


def make(parts: SchedulerParts) -> Iterator[KVEvents]:
    """Make the scheduler's half if the engine has a sink for its changes."""
    sink = parts.given.get(COUNTERS.name)
    if sink is not None:
        yield KVEvents(parts.state.blocks.cache, parts.state.limits, sink, find_half(parts.features, LoRASlots))


class KVEvents(SchedulerFeature):
    """Observes ``cache``, which may have been filled from a disk, and tells ``sink``."""

    def __init__(
        self, cache: PrefixCache, limits: SchedulerLimits, sink: KVEventSink, adapters: LoRASlots | None
    ) -> None:
        self._cache, self._sink = cache, sink
        is_full = limits.kv_windows.is_full
        self._counted: BoolArray = is_full if is_full.any() else ~is_full
        self._num_groups = limits.num_groups
        self._first_host = limits.num_blocks
        num_host_slots = (LIMITS.get(limits) or TierLimits()).num_host_slots
        self._first_disk = limits.num_blocks + num_host_slots
        self._has_tiers = num_host_slots > 0
        self._first_serial = self._last_serial = 0  # older runs are of old weights
        self._retired: set[int] = set()
        cache.observers.append(self)
        if adapters is not None:
            adapters.on_retire.append(self._retire)
        if runs := self._runs():
            sink.put(Rebuilt(runs, is_behind_gap=False))

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.on_new_weights.append(self.on_new_weights)
        hooks.stats.append(self.stats)

    def inserted(self, run: Run) -> None:
        self._last_serial = run.serial
        if self._is_told(run):
            self._put(self._described(run))

    def shortened(self, run: Run) -> None:
        self._put(Shortened(run.serial, run.length))

    def renamed(self, run: Run, places: BlockIds) -> None:
        numbers = np.unique(places // self._num_groups)
        self._put(Moved(run.serial, numbers, self._tiers(run.blocks[numbers]), run.token_bytes))

    def cleared(self) -> None:
        self._put(Cleared())

    def on_new_weights(self) -> None:
        """Tell the sink that what is cached is not found any more."""
        self._first_serial = self._last_serial + 1
        self._put(Cleared())

    def stats(self) -> dict[str, KVEventCounters]:
        return {COUNTERS.name: self._sink.counters()}

    def _retire(self, generation: int) -> None:
        self._retired.add(generation)
        self._put(Retired(generation))

    def _put(self, change: CacheChange) -> None:
        if not self._sink.put(change):
            self._sink.replace(Rebuilt(self._runs(), is_behind_gap=True))

    def _runs(self) -> list[Inserted]:
        """The runs that a new request may find, and some that follow no such."""
        return [self._described(run) for run in self._cache.runs() if self._is_told(run)]

    def _is_told(self, run: Run) -> bool:
        """Whether a run may be found by new requests, as far as it knows itself: it begins a prompt, or follows a run
        for which this is answered."""
        key = run.name[0]
        if run.serial < self._first_serial:
            return False
        if not isinstance(key, CacheKey):
            return not key if isinstance(key, str) else True  # a salted one of an earlier start is of no known salt
        return key.variant.number not in self._retired and (not key.salt or self._sink.publish_salted)

    def _described(self, run: Run) -> Inserted:
        tiers = self._tiers(run.blocks[: run.length]) if self._has_tiers else None
        return Inserted(run.serial, run.name[0], run.length, run.token_bytes, tiers)

    def _tiers(self, blocks: BlockIds) -> Tiers:
        """The tiers of logical blocks (n, G)."""
        farthest = blocks[:, self._counted].max(axis=1)
        tiers: Tiers = (farthest >= self._first_host).astype(np.uint8) + (farthest >= self._first_disk)
        return tiers
