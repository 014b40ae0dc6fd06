"""Blocks of the running rows: who gets which, what is shared, what is published, what is given back.

Table of a row with hits, and of its fork (``n > 1``) whose last prompt token is at position P - 1::

    donor   | hit (ref 2) | hit (ref 2) | own, full | own, partly filled |          positions 0 .. P - 2 computed
    fork    | shared      | shared      | shared    | copy of the donor's |         computes P - 1 itself

Only full blocks are ever shared; a partly filled one is copied on the fork's first write, which is at once.  The same
goes for a *tail*: the last block of a sequence that has ended and that others continue, as beams do (``Hits.tail``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.sched.block_pool import BlockPool
from tp_engine.sched.cached_run import BlockName, Place
from tp_engine.sched.entry import Entry
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.lru_queue import NO_BLOCKS, BlockIds
from tp_engine.sched.prefix_cache import PrefixCache
from tp_engine.sched.row_state import RowState
from tp_engine.sched.sequence import Sequence
from tp_engine.units import ceil_div


class Hits(msgspec.Struct, frozen=True):
    """Where the K/V of a waiting sequence's first ``num_tokens`` tokens are: full blocks to share, a tail to copy.

    ``place`` is behind those blocks in the prefix cache; ``next_name`` is that of the block that would be next there.
    """

    place: Place
    num_tokens: int = 0
    blocks: BlockIds = NO_BLOCKS
    tail: int | None = None
    next_name: BlockName | None = None


class BlockManager:
    """The one place where it is decided how block tables change."""

    def __init__(self, limits: SchedulerLimits, rows: RowState) -> None:
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(limits.num_blocks, limits.block_size * np.dtype(np.int32).itemsize)
        self._caching = limits.enable_prefix_caching
        self._rows = rows

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` fill."""
        return ceil_div(num_tokens, self.block_size)

    def find_hits(self, sequence: Sequence) -> Hits:
        """What is cached of a waiting sequence's first tokens; at least one token is left to compute."""
        salt = sequence.group.salt
        if not self._caching or sequence.wants_prompt_logprobs:
            return Hits(salt)
        token_bytes = sequence.token_ids.tobytes()
        usable = (len(sequence.token_ids) - 1) // self.block_size
        blocks, place = self.cache.match(salt, token_bytes, usable)
        num_tokens = len(blocks) * self.block_size
        name = self.cache.next_name(place, token_bytes, num_tokens)
        found = self.cache.match_tail(place, token_bytes, num_tokens)
        if found is None:
            return Hits(place, num_tokens, blocks, None, name)
        return Hits(place, num_tokens + found[1], blocks, found[0], name)

    def seat(self, entries: list[Entry]) -> list[IntArray]:
        """First tables of rows, int32: the blocks that they share, then new ones."""
        tables: list[IntArray] = []
        lengths = [self.blocks_for(entry.end) for entry in entries]
        taken = self.take(sum(lengths) - sum(len(entry.shared) for entry in entries))
        start = 0
        for entry, length in zip(entries, lengths, strict=True):
            end = start + length - len(entry.shared)
            table = taken[start:end]
            if len(entry.shared):
                table = np.concatenate((entry.shared, table), dtype=np.int32)
            self._rows.block_table[entry.sequence.row, :length] = table
            tables.append(table)
            start = end
        self._set_lengths(np.array([entry.sequence.row for entry in entries]), np.array(lengths))
        return tables

    def table(self, row: int) -> IntArray:
        """A copy of the row's block ids, int32."""
        return self._rows.block_table[row, : self._rows.num_blocks[row]].copy()

    def grow(self, row: int, count: int) -> BlockIds:
        """``count`` more blocks at the end of one row's table."""
        taken = self._take(count)
        start = int(self._rows.num_blocks[row])
        self._rows.block_table[row, start : start + count] = taken
        self._set_lengths(row, start + count)
        return taken

    def grow_rows(self, rows: IntArray) -> IntArray:
        """One more block for each of ``rows`` (distinct), in order."""
        taken = self.take(len(rows))
        self._rows.add_blocks(rows, taken)
        return taken

    def take(self, count: int) -> IntArray:
        """``count`` blocks, int32, that will be entered into tables."""
        return self._take(count).astype(np.int32)

    def publish(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Offer the full blocks of each sequence's first tokens, so many, to the prefix cache.

        They are computed, or will be in a step that is already decided: each layer stores the keys and values of all
        its tokens before any attention, so requests of that very step may use them.
        """
        if not self._caching:
            return
        added, size = [NO_BLOCKS], self.block_size
        for sequence, num_tokens in chunks:
            row, first, end = sequence.row, sequence.num_published, num_tokens // size
            if first < end:
                blocks = self._rows.block_table[row, first:end].astype(np.intp)
                known = self._rows.tokens[row, first * size : end * size].tobytes()
                new, sequence.place = self.cache.insert(blocks, sequence.place, known)
                sequence.num_published = end
                added.append(new)
        self.pool.mark_full(np.concatenate(added))

    def publish_tail(self, sequence: Sequence) -> None:
        """Offer the computed tokens in the last, partly filled block of a sequence that is about to be released."""
        row = sequence.row
        computed = int(self._rows.num_computed[row])
        first = computed - computed % self.block_size
        is_next = sequence.num_published * self.block_size == first  # not, if a step in flight computes more
        if not self._caching or first == computed or not is_next:
            return
        block = int(self._rows.block_table[row, first // self.block_size])
        if self.cache.insert_tail(block, sequence.place, self._rows.tokens[row, first:computed].tobytes()):
            self.pool.mark_tail(block)

    def release(self, sequence: Sequence) -> None:
        """The row gives its table back, tail first; what is cached stays so until its blocks are needed."""
        self.pool.release(self.table(sequence.row).astype(np.intp))
        self._set_lengths(sequence.row, 0)

    def clear_cache(self) -> None:
        """Forget all cached prefixes; no row may be running."""
        assert self.pool.num_used == 0
        self.cache.clear()
        self.pool.forget_content()

    def check_integrity(self) -> None:
        """Assert that pool, cache and tables add up: each block is held by as many rows as it counts."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        state = self._rows
        held: Counter[int] = Counter()
        for sequence in state.running():
            table = state.block_table[sequence.row, : state.num_blocks[sequence.row]].tolist()
            assert len(set(table)) == len(table), f"row {sequence.row} holds a block twice"
            held.update(table)
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == held[block], f"block {block}"
        assert np.flatnonzero(self.pool.contents()).tolist() == sorted(self.cache.cached_blocks())

    def _take(self, count: int) -> BlockIds:
        taken, lost = self.pool.take(count)
        if len(lost):
            self.cache.evict(lost)
        return taken

    def _set_lengths(self, rows: int | BlockIds, num_blocks: int | npt.NDArray[np.int64]) -> None:
        self._rows.num_blocks[rows] = num_blocks
        self._rows.capacity[rows] = num_blocks * self.block_size
