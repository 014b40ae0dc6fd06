"""What routers have been told: the runs of the prefix cache with their blocks' hashes, and events from changes.

A run that follows a block which has left is not found any more.  The cache says nothing of it; here it leaves with that
block, and so does what follows it in turn::

    run 7   | h0 | h1 | h2 | h3 |        shortened to 2: h2 and h3 are removed, and first of all run 11's h4 and h5
                        |
                        +---> run 11   | h4 | h5 |      from then on unknown, as what is inserted after it

A message is the list of a time, its events and the number of a data-parallel rank, in msgpack.  A block's hash is of
its own token ids and of all before it::

    root   the number 0; with a salt or an adapter: the first 8 bytes of the SHA-256 of the JSON text [SALT, ADAPTER]
    hash   the first 8 bytes of the SHA-256 of the hash before it (8 bytes) and its token ids (int32 each)

All numbers are little-endian.  1 stands for a hash of 0, which some routers take for none.  Equal prompts have equal
hashes in all processes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tp_engine.features.kv_events.scheduling import CacheChange, Cleared, Inserted, Moved, Rebuilt, Retired, Shortened
from tp_engine.plan import NO_IDS
from tp_engine.sched.blocks.cache_keys import THE_MODEL, CacheKey

_HASH_BYTES = 8
_ZERO, _ONE = bytes(_HASH_BYTES), (1).to_bytes(_HASH_BYTES, "little")

#: Where blocks are, by their tier: the pool, the host tier, the disk tier.
MEDIA = ("GPU", "CPU", "STORAGE")


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that follow each other are on a medium now.  ``token_ids`` are of all of them.  ``extra_keys`` has the
    salt of the first block of a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks are not on a medium any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is on any medium."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def encode(time_s: float, events: Sequence[Event], *, as_arrays: bool) -> bytes:
    """Return the payload of a message; ``as_arrays``: an event is a list of its name and its fields' values."""
    found: Sequence[Any] = [_values(event) for event in events] if as_arrays else events
    return msgspec.msgpack.encode((time_s, found, 0))


def _values(event: Event) -> list[Any]:
    values = [event.__struct_config__.tag, *msgspec.structs.astuple(event)]
    if isinstance(event, BlockStored) and event.extra_keys is None:
        values.pop()
    return values


def root_hash(salt: str, adapter: str) -> int:
    """Return what stands before a prompt's first block."""
    if not (salt or adapter):
        return 0
    return int.from_bytes(_first_bytes(json.dumps([salt, adapter]).encode()), "little")


def chain_hashes(before: int, token_bytes: bytes, block_bytes: int) -> array[int]:
    """Return the hashes of the blocks with these token ids, after the hash ``before``; uint64."""
    digest, digests = before.to_bytes(_HASH_BYTES, "little"), []
    for start in range(0, len(token_bytes), block_bytes):
        digest = _first_bytes(digest + token_bytes[start : start + block_bytes])
        digests.append(digest)
    return array("Q", np.frombuffer(b"".join(digests), "<u8").tobytes())


def _first_bytes(data: bytes) -> bytes:
    digest = hashlib.sha256(data).digest()[:_HASH_BYTES]
    return digest if digest != _ZERO else _ONE


_PLAIN = CacheKey("", "", THE_MODEL)


class _Run:
    """``before`` is the hash of the block before, or None; ``followers`` maps the serials of the runs that follow to
    the number of the block that each follows."""

    __slots__ = ("before", "followers", "hashes", "key", "parent", "serial", "tiers")

    def __init__(
        self, serial: int, parent: _Run | None, before: int | None, key: CacheKey, hashes: array[int], tiers: bytearray
    ) -> None:
        self.serial, self.parent, self.before, self.key = serial, parent, before, key
        self.hashes, self.tiers = hashes, tiers
        self.followers: dict[int, int] = {}


class CacheMirror:
    """Makes events of changes; ``block_size`` in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_bytes = block_size * NO_IDS.itemsize
        self._runs: dict[int, _Run] = {}
        self._serials: list[int] = []  # its keys, rising
        self._events: list[Event] = []

    def events(self, changes: Iterable[CacheChange]) -> list[Event]:
        """Return the events of these changes, in order."""
        for change in changes:
            self._apply(change)
        events, self._events = self._events, []
        return events

    def _apply(self, change: CacheChange) -> None:
        match change:
            case Inserted():
                self._insert(change)
            case Shortened():
                if (run := self._runs.get(change.serial)) is not None:
                    self._cut(run, change.length)
            case Moved():
                self._move(change)
            case Retired():
                generation, runs = change.generation, list(self._runs.values())
                for run in [one for one in runs if one.parent is None and one.key.variant.number == generation]:
                    self._cut(run, 0)
            case Cleared():
                self._clear()
                self._events.append(AllBlocksCleared())
            case Rebuilt():
                self._clear()
                if change.is_behind_gap:
                    self._events.append(AllBlocksCleared())
                for inserted in change.runs:
                    self._insert(inserted)

    def _clear(self) -> None:
        self._runs.clear()
        self._serials.clear()

    def _insert(self, change: Inserted) -> None:
        parent, number = None, 0
        if isinstance(change.parent, str):
            key, before = change.parent if isinstance(change.parent, CacheKey) else _PLAIN, None
            start = root_hash(key.salt, key.variant.name)
        else:
            found = self._find(change.parent)
            if found is None:
                return
            parent, number = found
            key, before = parent.key, parent.hashes[number]
            start = before
            parent.followers[change.serial] = number
        length = self._num_told(change)
        hashes = chain_hashes(start, change.token_bytes[: length * self._block_bytes], self._block_bytes)
        tiers = bytearray(length if change.tiers is None else change.tiers[:length].tobytes())
        run = _Run(change.serial, parent, before, key, hashes, tiers)
        self._runs[run.serial] = run
        self._serials.append(run.serial)  # the largest one so far
        for first, end in _stretches(run.tiers, range(length)):
            self._store(run, first, end, change.token_bytes)

    def _num_told(self, change: Inserted) -> int:
        """How many of its blocks are told: those before the first with an image, whose name means nothing elsewhere.
        What follows the others is not found, and not told either."""
        tokens = np.frombuffer(change.token_bytes, "<i4", change.length * self._block_size)
        return change.length if tokens.min() >= 0 else int((tokens < 0).argmax()) // self._block_size

    def _find(self, identity: int) -> tuple[_Run, int] | None:
        """The run and the number in it of the block with this identity; None if it is not there."""
        place = bisect_right(self._serials, identity) - 1
        if place < 0:
            return None
        run = self._runs[self._serials[place]]
        number = identity - run.serial
        return (run, number) if number < len(run.hashes) else None

    def _move(self, change: Moved) -> None:
        run = self._runs.get(change.serial)
        if run is None:
            return
        old = bytearray(run.tiers)
        is_told = change.numbers < len(old)
        numbers = change.numbers[is_told].tolist()
        for number, tier in zip(numbers, change.tiers[is_told].tolist(), strict=True):
            run.tiers[number] = tier
        numbers = [number for number in numbers if run.tiers[number] != old[number]]
        for first, end in _stretches(run.tiers, numbers):
            self._store(run, first, end, change.token_bytes)
        for first, end in _stretches(old, numbers):
            self._remove(old[first], run.hashes[first:end])

    def _cut(self, run: _Run, length: int) -> None:
        """Only the first ``length`` blocks of a run are left; what follows the others leaves first."""
        leaving = [(run, length)]
        for one, left in leaving:  # grows on the way
            lost = [serial for serial, number in one.followers.items() if number >= left]
            leaving += [(self._runs[serial], 0) for serial in lost]
        for one, left in reversed(leaving):
            for first, end in reversed([*_stretches(one.tiers, range(left, len(one.hashes)))]):
                self._remove(one.tiers[first], one.hashes[first:end])
            del one.hashes[left:], one.tiers[left:]
            if not left:
                del self._runs[one.serial], self._serials[bisect_left(self._serials, one.serial)]
                if one.parent is not None:
                    del one.parent.followers[one.serial]

    def _store(self, run: _Run, first: int, end: int, token_bytes: bytes) -> None:
        key = run.key
        is_start = first == 0 and run.parent is None
        tokens = np.frombuffer(token_bytes, "<i4", (end - first) * self._block_size, first * self._block_bytes)
        self._events.append(
            BlockStored(
                block_hashes=run.hashes[first:end].tolist(),
                parent_block_hash=run.hashes[first - 1] if first else run.before,
                token_ids=tokens.tolist(),
                block_size=self._block_size,
                lora_id=key.variant.number or None,
                medium=MEDIA[run.tiers[first]],
                lora_name=key.variant.name or None,
                extra_keys=[[key.salt], *[None] * (end - first - 1)] if key.salt and is_start else None,
            )
        )

    def _remove(self, tier: int, hashes: array[int]) -> None:
        """Remove the last of ``hashes`` first.  Removals from one medium, one after the other, are one event."""
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved) or last.medium != MEDIA[tier]:
            self._events.append(last := BlockRemoved([], MEDIA[tier]))
        last.block_hashes += reversed(hashes)


def _stretches(tiers: bytearray, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of the rising ``numbers`` that follow each other and are in one tier."""
    for _, stretch in groupby(enumerate(numbers), key=lambda item: (item[1] - item[0], tiers[item[1]])):
        members = [number for _, number in stretch]
        yield members[0], members[-1] + 1
