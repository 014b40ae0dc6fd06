"""The prefix cache: which blocks hold the K/V of a known prefix.

Blocks that a sequence publishes together are one *run*.  It is found by what it follows and by the token ids of its
first block; how far it agrees with a prompt is then one comparison of token ids.  A prompt is looked up in as many
steps as it has runs, not blocks, and nothing is taken for equal that is not: names are the token ids themselves, so
that there are no collisions, and Python's own hash of them is keyed anew in each process::

    salt ---> run 7: blocks 12, 5, 9, 30   [t0 .. t63]               the identity of block i of a run: serial + i
                           |
                           +---> run 11: blocks 4, 8   [t32 .. t63]  a run follows a block, and needs no other than
                           |                                         those before that one
                           +---> tail: block 2  [t32 .. t37]         partly filled: to be copied

Whoever holds a block of a run holds those before it, and gives it back before them.  So a run is evicted from its end,
and only its length changes.  Serials are never used again: what follows an evicted block is never found again.

The *tail* of a sequence that says that others will continue it, its last, partly filled block, is found in the same way
by all of its token ids.  It is never shared: who goes on from it copies it.
"""

from __future__ import annotations

import numpy as np

from tp_engine.sched.cached_run import TOKEN_BYTES, BlockName, Place, Run, identity
from tp_engine.sched.lru_queue import NO_BLOCKS, BlockIds


class PrefixCache:
    """Exact map from prefixes to blocks.  ``block_bytes`` is the size of one block's int32 token ids."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._run_named: dict[BlockName, Run] = {}
        self._tail_named: dict[BlockName, int] = {}
        self._tail_names: dict[int, BlockName] = {}
        self._runs: dict[int, Run] = {}  # by serial
        self._serial_of = np.zeros(num_blocks, dtype=np.int64)  # of each block's run; 0: it is in none
        self._next_serial = 1

    def match(self, salt: str, token_bytes: bytes, max_blocks: int) -> tuple[BlockIds, Place]:
        """The cached blocks, at most ``max_blocks``, that hold a sequence's first tokens; the place behind them."""
        return self._walk(salt, token_bytes, max_blocks)

    def next_name(self, place: Place, token_bytes: bytes, num_tokens: int) -> BlockName:
        """Of the block at ``place`` that would hold a sequence's tokens from ``num_tokens`` on."""
        start = num_tokens * TOKEN_BYTES
        return identity(place), token_bytes[start : start + self._block_bytes]

    def match_tail(self, place: Place, token_bytes: bytes, num_tokens: int) -> tuple[int, int] | None:
        """The longest tail at ``place`` that follows a sequence's first ``num_tokens``: its block, its tokens' number.

        At least one of the tokens is left to compute.
        """
        if not self._tail_named:
            return None
        parent, start = identity(place), num_tokens * TOKEN_BYTES
        longest = min(self._block_bytes, len(token_bytes) - start) - TOKEN_BYTES
        for length in range(longest, 0, -TOKEN_BYTES):
            block = self._tail_named.get((parent, token_bytes[start : start + length]))
            if block is not None:
                return block, length // TOKEN_BYTES
        return None

    def cached_blocks(self) -> list[int]:
        """All blocks in runs, used or not, and all tails."""
        return [*np.flatnonzero(self._serial_of).tolist(), *self._tail_names]

    def insert(self, blocks: BlockIds, place: Place, token_bytes: bytes) -> tuple[BlockIds, Place]:
        """Publish computed, full blocks that follow each other and ``place``; ``token_bytes`` are theirs.

        Returns the blocks that are cached now and were not before, and the place behind the last.  Content that is
        cached already keeps its first block.  Nothing is added behind a block that has been evicted; what stands behind
        one already is found again when it comes with its own blocks before it.
        """
        known, place = self._walk(place, token_bytes, len(blocks))
        new = blocks[len(known) :]
        if not len(new) or (not isinstance(place, str) and place[1] >= place[0].length):
            return NO_BLOCKS, place
        if any(self._serial_of[new].tolist()):  # of runs that cannot be found any more
            self.evict(new[self._serial_of[new] > 0])
        size = self._block_bytes
        if len(known):
            token_bytes = token_bytes[len(known) * size :]
        name = identity(place), token_bytes[:size]
        run = Run(name, self._next_serial, new, token_bytes)
        self._run_named[name] = self._runs[run.serial] = run
        self._serial_of[new] = run.serial
        self._next_serial += len(new)
        return new, (run, len(new) - 1)

    def insert_tail(self, block: int, place: Place, token_bytes: bytes) -> bool:
        """Publish a partly filled block that follows ``place``; False if one with the same content is known."""
        assert 0 < len(token_bytes) < self._block_bytes and not self._serial_of[block]
        name = identity(place), token_bytes
        if name in self._tail_named:
            return False
        self._tail_named[name] = block
        self._tail_names[block] = name
        return True

    def evict(self, blocks: BlockIds) -> None:
        """These blocks are about to be overwritten: nothing leads to them any more."""
        serials = self._serial_of[blocks].tolist()
        self._serial_of[blocks] = 0
        done = 0
        while done < len(serials):
            if serials[done]:
                done += self._evict_run(blocks, serials, done)
            else:
                del self._tail_named[self._tail_names.pop(int(blocks[done]))]
                done += 1

    def clear(self) -> None:
        """Forget everything."""
        for run in self._runs.values():
            run.length = 0
        for names in (self._runs, self._run_named, self._tail_named, self._tail_names):
            names.clear()
        self._serial_of[:] = 0

    def check_integrity(self) -> None:
        """Assert that the runs, the map and the blocks' own records agree."""
        for name, run in self._run_named.items():
            assert run.name == name and run.token_bytes.startswith(name[1]) and 0 < run.length <= len(run.blocks)
            assert len(run.token_bytes) == len(run.blocks) * self._block_bytes
            living = run.blocks[: run.length]
            assert self._runs[run.serial] is run and np.all(self._serial_of[living] == run.serial)
        assert len(self._runs) == len(self._run_named)
        assert {block: name for name, block in self._tail_named.items()} == self._tail_names
        assert not self._serial_of[list(self._tail_names)].any(), "a block is cached, and a tail"

    def _walk(self, place: Place, token_bytes: bytes, max_blocks: int) -> tuple[BlockIds, Place]:
        """The cached blocks behind ``place`` that ``token_bytes`` begin with, and the place behind the last."""
        size = self._block_bytes
        end = min(len(token_bytes) // size, max_blocks) * size
        found: list[BlockIds] = []
        start = 0
        while start < end:
            run, first, count = self._agreement(place, token_bytes, start, end)
            if run is None:
                break
            found.append(run.blocks[first : first + count])
            place = run, first + count - 1
            start += count * size
        if len(found) == 1:
            return found[0], place
        return np.concatenate(found) if found else NO_BLOCKS, place

    def _agreement(self, place: Place, token_bytes: bytes, start: int, end: int) -> tuple[Run | None, int, int]:
        """Which run goes on at ``place`` with the tokens from ``start`` on, from which of its blocks, and how many
        of its blocks agree until ``end``."""
        if not isinstance(place, str):
            run, first = place[0], place[1] + 1
            if count := run.num_equal(first, token_bytes, start, end):
                return run, first, count
        found = self._run_named.get((identity(place), token_bytes[start : start + self._block_bytes]))
        return found, 0, 0 if found is None else found.num_equal(0, token_bytes, start, end)

    def _evict_run(self, blocks: BlockIds, serials: list[int], start: int) -> int:
        """Evict ``blocks[start]`` from its run, and those behind it that are of the same; how many that are."""
        serial = serials[start]
        run = self._runs.get(serial)
        if run is None:  # an earlier block of it has been evicted
            return 1
        count = min(run.length, len(serials) - start)
        if serials[start + count - 1] != serial:
            count = next(i for i in range(count) if serials[start + i] != serial)
        length = run.length - count
        if run.blocks[length : run.length][::-1].tobytes() != blocks[start : start + count].tobytes():
            count = 1  # not its last ones
            length = min([run.length, *np.flatnonzero(run.blocks == blocks[start]).tolist()])
        if length:
            run.shorten(length)
        else:
            run.length = 0
            del self._run_named[run.name], self._runs[serial]
        return count
