"""The prefix cache: which blocks hold the K/V of a known prefix.

Logical blocks that a sequence publishes together are one *run*.  It is found by what it follows and by the token ids of
its first block; how far it agrees with a prompt is then one comparison of token ids.  A prompt is looked up in as many
steps as it has runs, not blocks.  Names are the token ids themselves, so there are no collisions; Python's own hash of
them has another key in each process::

    salt ---> run 7: blocks 12, 5, 9, 30   [t0 .. t63]               the identity of block i of a run: serial + i
                           |
                           +---> run 11: blocks 4, 8   [t32 .. t63]  a run follows a block, and needs no other than
                           |                                         those before that one
                           +---> tail: block 2  [t32 .. t37]         partly filled: to be copied

In a full group, a row that holds a block of a run holds those before it, and gives it back before them.  So a run is
evicted from its end, and only its length changes.  Serials are never used again, so that blocks after an evicted one
are never found again.

A model of several groups of layers has a block of each in every place of a run.  Groups with a window give theirs back
from the front.  So any block may be missing in their columns, which does not change the length of the run; a sequence
that computes such a block again puts it there.  ``KvWindows.longest_hit`` says what suffices for a hit::

    run 7, a full group       12   5   9  30
           one with a window   .   .   6  21       a hit of four blocks if the window needs the last two only

Where all groups have windows, a run is never shortened, because it leads to the runs behind it.  It is dropped when it
has neither blocks nor followers.

The *tail* of a sequence is its last, partly filled block, kept if others will continue the sequence.  It is found in
the same way, by all of its token ids.  It is never shared: a sequence that goes on from it copies it, in every group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds

#: What precedes a block: the identity of the block before it, or the salt in front of a sequence's first block.
Identity: TypeAlias = int | str

BlockName: TypeAlias = tuple[Identity, bytes]
"""What a block follows, and its token ids: names the run that begins with it, or a tail."""

NO_BLOCK = -1
"""Stands for a block of the pool that is not there."""

TOKEN_BYTES = 4
"""Token ids are int32."""

_ONE_FULL_GROUP: BoolArray = np.array([True])


class PrefixCache:
    """Exact map from prefixes to blocks.  ``block_bytes`` is the size of one block's int32 token ids; ``is_full`` (G,)
    says which groups keep all blocks."""

    def __init__(self, num_blocks: int, block_bytes: int, is_full: BoolArray = _ONE_FULL_GROUP) -> None:
        self._block_bytes = block_bytes
        self._no_blocks = NO_BLOCKS.reshape(0, len(is_full))
        self._is_full = is_full
        self._num_groups = len(is_full)
        self._has_full, self._has_windows = bool(is_full.any()), not is_full.all()
        self._run_named: dict[BlockName, Run] = {}
        self._tail_named: dict[BlockName, BlockIds] = {}
        self._tail_names: dict[int, BlockName] = {}
        self._runs: dict[int, Run] = {}  # by serial
        self._next_serial = 1
        self.observers: list[CacheObserver] = []
        self.make_room(num_blocks)

    def make_room(self, num_ids: int) -> None:
        """Let there be so many ids: the pool's blocks, and after them what lies below it.  Nothing is cached yet."""
        assert not self._runs, "ids are given out"
        self._serial_of = np.zeros(num_ids, dtype=np.int64)  # of each id's run; 0: it is in none
        self._place_of = np.zeros(num_ids, dtype=np.int64)  # of each id in its run's array, counted flat
        self._numbers = np.arange(num_ids)

    def match(self, salt: str, token_bytes: bytes, max_blocks: int) -> tuple[BlockIds, Place]:
        """Return the known logical blocks (n, G) of a sequence's first tokens, at most ``max_blocks``, and the place
        behind them.  A block that is missing, which happens in groups with a window, is ``NO_BLOCK``."""
        parts, _, place = self._walk(salt, token_bytes, max_blocks)
        if not parts:
            return self._no_blocks, place
        found = [run.blocks[first : first + count] for run, first, count in parts]
        if len(found) == 1:
            return found[0], place
        return np.concatenate(found), place

    def stretches(self, salt: str, token_bytes: bytes, max_blocks: int) -> list[tuple[int, int]]:
        """Return the known blocks, at most ``max_blocks``, with a sequence's first tokens: identities that follow one
        another, by the first one and their number."""
        parts, _, _ = self._walk(salt, token_bytes, max_blocks)
        return [(run.serial + first, count) for run, first, count in parts]

    def next_name(self, place: Place, token_bytes: bytes, num_tokens: int) -> BlockName:
        """Name of the block at ``place`` that would hold a sequence's tokens from ``num_tokens`` on."""
        start = num_tokens * TOKEN_BYTES
        return identity(place), token_bytes[start : start + self._block_bytes]

    def match_tail(self, place: Place, token_bytes: bytes, num_tokens: int) -> tuple[BlockIds, int] | None:
        """Return the longest tail at ``place`` that follows a sequence's first ``num_tokens``: its block of each group
        (G,), the number of its tokens.  At least one token is left to compute."""
        if not self._tail_named:
            return None
        parent, start = identity(place), num_tokens * TOKEN_BYTES
        longest = min(self._block_bytes, len(token_bytes) - start) - TOKEN_BYTES
        for length in range(longest, 0, -TOKEN_BYTES):
            blocks = self._tail_named.get((parent, token_bytes[start : start + length]))
            if blocks is not None:
                return blocks, length // TOKEN_BYTES
        return None

    def cached_blocks(self) -> list[int]:
        """Return all blocks in runs, used or not, and all tails."""
        return [*np.flatnonzero(self._serial_of).tolist(), *self._tail_names]

    def where(self, blocks: BlockIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the serial of each block's run, 0 for none, and its place among the run's blocks, counted flat."""
        return self._serial_of[blocks], self._place_of[blocks]

    def run(self, serial: int) -> Run | None:
        """Return the run of this serial, if it is still there."""
        return self._runs.get(serial)

    @property
    def num_groups(self) -> int:
        """Blocks of a logical block."""
        return self._num_groups

    def runs(self) -> Iterable[Run]:
        """Return all runs, each after the one that it follows."""
        return self._runs.values()

    def groups(self) -> dict[int, int]:
        """Return the group of each block in a run."""
        blocks = np.flatnonzero(self._serial_of)
        return dict(zip(blocks.tolist(), (self._place_of[blocks] % self._num_groups).tolist(), strict=True))

    def insert(self, blocks: BlockIds, place: Place, token_bytes: bytes) -> tuple[BlockIds, Place]:
        """Publish computed, full logical blocks (n, G) that follow each other and ``place``; a block that a window has
        left behind is ``NO_BLOCK``.  ``token_bytes`` are theirs.

        Returns the blocks that are cached now and were not before, and the place after the last.  Content that is
        cached already keeps its first block.  Nothing is added after a block that has been evicted.  Runs that follow
        one are found again when a sequence brings the blocks before them.
        """
        parts, num_known, place = self._walk(place, token_bytes, len(blocks))
        added = self._fill(parts, blocks) if self._has_windows else NO_BLOCKS
        new = blocks[num_known:]
        if not len(new) or (not isinstance(place, str) and place[1] >= place[0].length):
            return added, place
        if not self._has_full and not (new != NO_BLOCK).any():
            return added, LOST
        size = self._block_bytes
        if num_known:
            token_bytes = token_bytes[num_known * size :]
        run = Run((identity(place), token_bytes[:size]), self._next_serial, new, token_bytes)
        self._next_serial += len(new)
        self._run_named[run.name] = self._runs[run.serial] = run
        flat = new.reshape(-1)
        if not self._has_windows:
            added = self._enter(run, flat, self._numbers[: len(flat)])
        else:
            if not self._has_full and not isinstance(place, str):
                run.parent = place[0]
                run.parent.num_followers += 1
            there = np.flatnonzero(flat != NO_BLOCK)
            added = np.concatenate((added, self._enter(run, flat[there], there)))
        for observer in self.observers:
            observer.inserted(run)
        return added, (run, len(new) - 1)

    def insert_tail(self, blocks: BlockIds, place: Place, token_bytes: bytes) -> bool:
        """Publish a partly filled block of each group (G,) that follow ``place``; False if their content is known."""
        assert 0 < len(token_bytes) < self._block_bytes and not self._serial_of[blocks].any()
        name = identity(place), token_bytes
        if name in self._tail_named:
            return False
        self._tail_named[name] = blocks
        self._tail_names.update(dict.fromkeys(blocks.tolist(), name))
        return True

    def evict(self, blocks: BlockIds) -> None:
        """Forget these blocks, at least one, because they will be overwritten."""
        serials = self._serial_of[blocks]
        self._serial_of[blocks] = 0
        for start, end in _stretches(serials):
            if serial := int(serials[start]):
                self._evict_from(serial, blocks[start:end])
            else:
                for block in blocks[start:end].tolist():
                    self._evict_tail(block)

    def rename(self, old: BlockIds, new: BlockIds) -> None:
        """Find the content of each block ``old`` in a run in ``new`` from now on, which was in none."""
        serials, places = self._serial_of[old], self._place_of[old]
        self._serial_of[old] = 0
        self._serial_of[new], self._place_of[new] = serials, places
        for start, end in _stretches(serials):
            run = self._runs.get(int(serials[start]))
            if run is not None:
                flat, numbers = run.blocks.reshape(-1), places[start:end]
                kept = numbers < len(flat)
                flat[numbers[kept]] = new[start:end][kept]
                for observer in self.observers:
                    observer.renamed(run, numbers[kept])

    def are_found(self, blocks: BlockIds) -> BoolArray:
        """Return which of ``blocks``, full ones or tails, a sequence may find in a run."""
        serials = self._serial_of[blocks]
        ends = np.zeros(len(blocks), dtype=np.int64)
        for start, end in _stretches(serials):
            run = self._runs.get(int(serials[start]))
            ends[start:end] = 0 if run is None else run.length * self._num_groups
        found: BoolArray = self._place_of[blocks] < ends
        return found

    def clear(self) -> None:
        """Forget everything."""
        for run in self._runs.values():
            run.length = 0
        for names in (self._runs, self._run_named, self._tail_named, self._tail_names):
            names.clear()
        self._serial_of[:] = 0
        for observer in self.observers:
            observer.cleared()

    def check_integrity(self) -> None:
        """Assert that the runs, the map and the blocks' own records agree."""
        num_followers = dict.fromkeys(self._runs, 0)
        for name, run in self._run_named.items():
            assert run.name == name and run.token_bytes.startswith(name[1]) and 0 < run.length <= len(run.blocks)
            assert len(run.token_bytes) == len(run.blocks) * self._block_bytes and self._runs[run.serial] is run
            if run.parent is not None:
                num_followers[run.parent.serial] += 1
        if self._run_named:
            self._check_blocks(list(self._run_named.values()))
        assert len(self._runs) == len(self._run_named)
        for serial, run in self._runs.items():
            assert run.num_followers == num_followers[serial]
            assert self._has_full or run.num_held or run.num_followers, "a run leads to nothing"
        for name, blocks in self._tail_named.items():
            assert all(self._tail_names[block] == name for block in blocks.tolist())
        assert not self._serial_of[list(self._tail_names)].any(), "a block is cached, and a tail"

    def _check_blocks(self, runs: list[Run]) -> None:
        """Assert that the living blocks of these runs know their run and their place; all runs at once."""
        lengths, serials, num_held = np.array([(run.length, run.serial, run.num_held) for run in runs]).T
        blocks, sizes = np.concatenate([run.blocks[: run.length] for run in runs]), lengths * self._num_groups
        assert np.all(blocks[:, self._is_full] != NO_BLOCK), "a full group lacks a block"
        flat, owner = blocks.reshape(-1), np.repeat(np.arange(len(runs)), sizes)
        held, places = flat != NO_BLOCK, np.arange(len(flat)) - (np.cumsum(sizes) - sizes)[owner]
        assert np.array_equal(self._place_of[flat[held]], places[held])
        assert np.array_equal(self._serial_of[flat[held]], serials[owner[held]])
        assert self._has_full or np.array_equal(np.bincount(owner[held], minlength=len(runs)), num_held)

    def _walk(self, place: Place, token_bytes: bytes, max_blocks: int) -> tuple[list[tuple[Run, int, int]], int, Place]:
        """The known blocks of ``token_bytes`` after ``place``: of each run its first block and how many; how many in
        all; the place after the last."""
        size = self._block_bytes
        end = min(len(token_bytes) // size, max_blocks) * size
        parts: list[tuple[Run, int, int]] = []
        start = 0
        while start < end:
            run, first, count = self._agreement(place, token_bytes, start, end)
            if run is None:
                break
            parts.append((run, first, count))
            place = run, first + count - 1
            start += count * size
        return parts, start // size, place

    def _agreement(self, place: Place, token_bytes: bytes, start: int, end: int) -> tuple[Run | None, int, int]:
        """Which run goes on at ``place`` with the tokens from ``start`` on, from which of its blocks, and how many
        of its blocks agree until ``end``."""
        if not isinstance(place, str):
            run, first = place[0], place[1] + 1
            if count := run.num_equal(first, token_bytes, start, end):
                return run, first, count
        found = self._run_named.get((identity(place), token_bytes[start : start + self._block_bytes]))
        return found, 0, 0 if found is None else found.num_equal(0, token_bytes, start, end)

    def _fill(self, parts: list[tuple[Run, int, int]], blocks: BlockIds) -> BlockIds:
        """Put those of ``blocks`` into the runs that are missing there; returns these."""
        added, start = [NO_BLOCKS], 0
        for run, first, count in parts:
            known, ours = run.blocks[first : first + count], blocks[start : start + count]
            gaps = np.flatnonzero((known == NO_BLOCK) & (ours != NO_BLOCK))
            if len(gaps):
                flat = run.blocks.reshape(-1)
                places = gaps + first * self._num_groups
                flat[places] = ours.reshape(-1)[gaps]
                added.append(self._enter(run, flat[places], places))
            start += count
        return np.concatenate(added)

    def _enter(self, run: Run, blocks: BlockIds, places: BlockIds) -> BlockIds:
        """These blocks, at ``places`` of the run's array, are cached from now on."""
        if any(self._serial_of[blocks].tolist()):  # they are in runs that are not found any more
            self.evict(blocks[self._serial_of[blocks] > 0])
        self._serial_of[blocks] = run.serial
        self._place_of[blocks] = places
        run.num_held += len(blocks)
        return blocks

    def _evict_from(self, serial: int, blocks: BlockIds) -> None:
        """These blocks of one run are gone; in a full group all after them go too."""
        run = self._runs.get(serial)
        if run is None:  # an earlier block of it has been evicted
            return
        run.num_held -= len(blocks)
        places = self._place_of[blocks]
        length = run.length
        if self._has_windows:
            numbers, groups = np.divmod(places, self._num_groups)
            here = numbers < length
            run.blocks[numbers[here], groups[here]] = NO_BLOCK
            length = min([length, *numbers[self._is_full[groups]].tolist()])
        else:
            length = min(length, int(np.minimum.reduce(places)) // self._num_groups)
        if not length or not (self._has_full or run.num_held or run.num_followers):
            self._drop(run)
        elif length < run.length:
            run.shorten(length)
            for observer in self.observers:
                observer.shortened(run)

    def _drop(self, run: Run) -> None:
        """The run leads nowhere any more; perhaps the one before it does not either."""
        run.length = 0
        del self._run_named[run.name], self._runs[run.serial]
        for observer in self.observers:
            observer.shortened(run)
        parent = run.parent
        if parent is not None:
            parent.num_followers -= 1
            if not parent.num_held and not parent.num_followers:
                self._drop(parent)

    def _evict_tail(self, block: int) -> None:
        """A tail's block of one group is gone, and with it the tail: its other blocks are not found any more."""
        name = self._tail_names.pop(block)
        blocks = self._tail_named.get(name)
        if blocks is not None and block in blocks.tolist():
            del self._tail_named[name]


class Run:
    """Logical blocks that entered the cache together; the first ``length`` of them are still there.

    ``name`` is what it follows and the token ids of its first block; ``token_bytes`` are those of all its blocks.
    ``blocks`` (n, G) has the block of each group, or ``NO_BLOCK``.  In a cache without a full group, ``parent`` is the
    run that this one follows, ``num_held`` counts the blocks that are there and ``num_followers`` the runs after it.
    """

    __slots__ = ("blocks", "length", "name", "num_followers", "num_held", "parent", "serial", "token_bytes")

    def __init__(self, name: BlockName, serial: int, blocks: BlockIds, token_bytes: bytes) -> None:
        self.name, self.serial, self.blocks, self.token_bytes = name, serial, blocks, token_bytes
        self.length = len(blocks)
        self.parent: Run | None = None
        self.num_held = self.num_followers = 0

    def shorten(self, length: int) -> None:
        """Only the first ``length`` blocks are left; what the others held is given back when it is half."""
        self.length = length
        if 2 * length <= len(self.blocks):
            self.blocks = self.blocks[:length].copy()
            self.token_bytes = self.token_bytes[: length * len(self.name[1])]

    def num_equal(self, first: int, token_bytes: bytes, start: int, end: int) -> int:
        """Return how many blocks from ``first`` on have the tokens in ``token_bytes[start:end]``."""
        size = len(self.name[1])
        count = min(self.length - first, (end - start) // size)
        if count <= 0:
            return 0
        offset, length = first * size, count * size
        if self.token_bytes[offset : offset + length] == token_bytes[start : start + length]:
            return count
        ours = np.frombuffer(self.token_bytes, np.uint8, length, offset)
        theirs = np.frombuffer(token_bytes, np.uint8, length, start)
        return int(np.argmax(ours != theirs)) // size


class CacheObserver(Protocol):
    """Sees which logical blocks are in the cache, and which blocks hold them.  Those that follow a block which has left
    the cache are not found either, and there is no call for them."""

    def inserted(self, run: Run) -> None:
        """See a new run."""

    def shortened(self, run: Run) -> None:
        """See that only the first ``run.length`` blocks of a run are left, or none."""

    def renamed(self, run: Run, places: BlockIds) -> None:
        """See that these ``places`` of the run's blocks, counted flat, have other ids now."""

    def cleared(self) -> None:
        """See that all is forgotten."""


#: How far a sequence has come in the cache: after a logical block of a run, or still at its salt.
Place: TypeAlias = tuple[Run, int] | str

#: A place after a block that is not in the cache.
LOST: Place = (Run((0, b""), 0, np.empty((0, 1), dtype=np.intp), b""), 0)


def _stretches(serials: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of equal serials, of which there is at least one."""
    changes = (np.flatnonzero(serials[1:] != serials[:-1]) + 1).tolist()
    return pairwise((0, *changes, len(serials)))


def is_lost(place: Place) -> bool:
    """Return whether the block before ``place`` has left the cache, so that nothing can be added there."""
    return not isinstance(place, str) and place[1] >= place[0].length


def identity(place: Place) -> Identity:
    """Identity of the last block before ``place``, or the salt."""
    return place if isinstance(place, str) else place[0].serial + place[1]
