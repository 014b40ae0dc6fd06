"""Blocks of the running rows: who gets which, what is shared, what is published, what is given back.

Table of a row with hits, and of its fork (``n > 1``) whose last prompt token is at position P - 1::

    donor   | hit (ref 2) | hit (ref 2) | own, full | own, partly filled |          positions 0 .. P - 2 computed
    fork    | shared      | shared      | shared    | copy of the donor's |         computes P - 1 itself

Only full blocks are ever shared; a partly filled one is copied on the fork's first write, which is at once.  The same
goes for a *tail*: the last block of a sequence that has ended and that others continue, as beams do (``Hits.tail``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from tp_engine.plan import IntArray
from tp_engine.sched.block_pool import BlockPool
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.prefix_cache import PrefixCache
from tp_engine.sched.row_state import RowState
from tp_engine.sched.sequence import Sequence
from tp_engine.units import ceil_div


@dataclass(frozen=True, slots=True)
class Hits:
    """Where the K/V of a waiting sequence's first ``num_tokens`` tokens are: full blocks to share, a tail to copy."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    tail: int | None = None


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
        if not self._caching:
            return Hits()
        token_bytes, salt = sequence.token_ids.tobytes(), sequence.group.salt
        self.cache.extend_hashes(sequence.hashes, salt, token_bytes)
        if sequence.wants_prompt_logprobs:
            return Hits()
        usable = (len(sequence.token_ids) - 1) // self.block_size
        blocks = self.cache.match(sequence.hashes, salt, token_bytes, usable)
        num_tokens = len(blocks) * self.block_size
        parent = self.cache.identity(blocks[-1]) if blocks else salt
        found = self.cache.match_tail(parent, token_bytes[num_tokens * sequence.token_ids.itemsize :])
        if found is None:
            return Hits(num_tokens, blocks)
        return Hits(num_tokens + found[1], blocks, found[0])

    def num_idle(self, blocks: Seq[int]) -> int:
        """How many of these nobody uses, so that using them makes fewer available."""
        return sum(self.pool.ref_count(block) == 0 for block in blocks)

    def seat(self, sequence: Sequence, held: Seq[int], num_tokens: int) -> None:
        """First table of a row: ``held`` blocks, shared from now on, then new ones up to ``num_tokens`` tokens."""
        row = sequence.row
        self.pool.share(held)
        self._rows.block_table[row, : len(held)] = held
        self._set_length(row, len(held))
        self.grow(row, self.blocks_for(num_tokens) - len(held))

    def start_chain(self, sequence: Sequence, num_hits: int) -> None:
        """From which block on the seated sequence publishes: behind its hits."""
        last = int(self._rows.block_table[sequence.row, num_hits - 1]) if num_hits else None
        sequence.num_published = num_hits
        sequence.parent = sequence.group.salt if last is None else self.cache.identity(last)

    def table(self, row: int) -> IntArray:
        """A copy of the row's block ids, int32."""
        return self._rows.block_table[row, : self._rows.num_blocks[row]].copy()

    def grow(self, row: int, count: int) -> list[int]:
        """``count`` more blocks at the end of one row's table."""
        taken = self._take(count)
        start = int(self._rows.num_blocks[row])
        self._rows.block_table[row, start : start + count] = taken
        self._set_length(row, start + count)
        return taken

    def grow_rows(self, rows: IntArray) -> IntArray:
        """One more block for each of ``rows`` (distinct), in order."""
        taken = self.take(len(rows))
        self._rows.add_blocks(rows, taken)
        return taken

    def take(self, count: int) -> IntArray:
        """``count`` blocks, int32, that will be entered into tables."""
        return np.array(self._take(count), dtype=np.int32)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Offer the full blocks of the sequence's first ``num_tokens`` tokens to the prefix cache.

        They are computed, or will be in a step that is already decided: each layer stores the keys and values of all
        its tokens before any attention, so requests of that very step may use them.
        """
        row = sequence.row
        first, end = sequence.num_published, num_tokens // self.block_size
        if not self._caching or sequence.parent is None or first >= end:
            return
        if len(sequence.hashes) < end:
            known = self._rows.tokens[row, : end * self.block_size]
            self.cache.extend_hashes(sequence.hashes, sequence.group.salt, known.tobytes())
        added, sequence.parent = self.cache.insert(
            self._rows.block_table[row, first:end].tolist(),
            sequence.hashes[first:end],
            sequence.parent,
            self._rows.tokens[row, first * self.block_size : end * self.block_size].tobytes(),
        )
        sequence.num_published = end
        self.pool.mark_hashed(added)

    def publish_tail(self, sequence: Sequence) -> None:
        """Offer the computed tokens in the last, partly filled block of a sequence that is about to be released."""
        row = sequence.row
        computed = int(self._rows.num_computed[row])
        first = computed - computed % self.block_size
        is_next = sequence.num_published * self.block_size == first  # not, if a step in flight computes more
        if not self._caching or sequence.parent is None or first == computed or not is_next:
            return
        block = int(self._rows.block_table[row, first // self.block_size])
        if self.cache.insert_tail(block, sequence.parent, self._rows.tokens[row, first:computed].tobytes()):
            self.pool.mark_tail(block)

    def release(self, sequence: Sequence) -> None:
        """The row gives its table back, tail first; what is cached stays so until its blocks are needed."""
        self.pool.release(self._rows.block_table[sequence.row, : self._rows.num_blocks[sequence.row]].tolist())
        self._set_length(sequence.row, 0)

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
        known = [block for block in range(self.pool.num_blocks) if self.pool.holds_content(block)]
        assert known == sorted(self.cache.cached_blocks())

    def _take(self, count: int) -> list[int]:
        taken, evicted = self.pool.take(count)
        self.cache.evict(evicted)
        return taken

    def _set_length(self, row: int, num_blocks: int) -> None:
        self._rows.num_blocks[row] = num_blocks
        self._rows.capacity[row] = num_blocks * self.block_size
