"""Blocks of the running rows: which row gets which, what is shared, what is published, what is given back.

Table of a row with hits, and of its fork (``n > 1``) whose last prompt token is at position P - 1::

    donor   | hit (ref 2) | hit (ref 2) | own, full | own, partly filled |          positions 0 .. P - 2 computed
    fork    | shared      | shared      | shared    | copy of the donor's |         computes P - 1 itself

Only full blocks are ever shared; a partly filled one is copied on the fork's first write, which is at once.  So is a
*tail*: the last block of a sequence that has ended and that others continue, as beams do (``Hits.tail``).

A model's groups of layers have tables of their own, which grow together; those with a window give blocks back from the
front (``expire``), whenever their row grows and whenever blocks run out::

    group 0, full           | 0 | 5 | 10 | 15 | 20 | 25 |
    group 1, with a window  | . | . |  . |  . | 21 | 26 |      the window reaches into the fifth block

A row that enters with hits, or as a fork, holds in each group only what it needs itself.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.sched.blocks.block_pool import BlockPool
from tp_engine.sched.blocks.kv_windows import Counts
from tp_engine.sched.blocks.lower_tier import LowerTier
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds
from tp_engine.sched.blocks.prefix_cache import NO_BLOCK, BlockName, Place, PrefixCache, is_lost
from tp_engine.sched.blocks.snapshots import Snapshots
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.sequence import Entry, Sequence, Shared
from tp_engine.system.units import ceil_div


class Hits(msgspec.Struct, frozen=True):
    """Where the K/V of a waiting sequence's first ``num_tokens`` tokens are: full blocks to share, a tail to copy.

    ``tail`` (G,) is a block of each group.  ``place`` is after the shared blocks in the prefix cache; ``next_name`` is
    that of the block that would be next there.  ``parted`` is a known block after which the sequence could begin if
    there were a snapshot of the recurrent state (``snapshots``), and the number of tokens up to it.
    """

    shared: Shared
    place: Place
    num_tokens: int = 0
    tail: BlockIds | None = None
    next_name: BlockName | None = None
    parted: tuple[int, int] | None = None


class Donation(msgspec.Struct, frozen=True):
    """What a fork gets from its donor, which is in ``row``: full blocks to share, and partly filled ones to copy,
    ``source`` (G,)."""

    row: int
    shared: Shared
    source: BlockIds | None


class BlockManager:
    """Decides how block tables change; nothing else does.  ``tier`` is what lies below the pool."""

    def __init__(self, limits: SchedulerLimits, rows: RunningBatch) -> None:
        self.block_size = limits.block_size
        self.num_groups = limits.num_groups
        self.windows = limits.kv_windows
        self._has_windows = self.windows.has_windows
        self.pool = BlockPool(limits.num_blocks)
        block_bytes = limits.block_size * np.dtype(np.int32).itemsize
        self.cache = PrefixCache(limits.num_blocks, block_bytes, self.windows.is_full)
        self._caching = limits.enable_prefix_caching
        self.tier = LowerTier(self.pool, self.cache)
        self.snapshots = None
        if limits.has_states and self._caching:
            first_slot = limits.max_num_seqs + limits.num_spare_rows
            self.snapshots = Snapshots(first_slot, limits.num_snapshots, rows)
        self._max_chunk = limits.max_chunk_tokens
        self._rows = rows
        self._from_start = self.windows.first_needed(0)
        self._nothing = Shared(NO_BLOCKS.reshape(0, self.num_groups), self._from_start, NO_BLOCKS)

    def blocks_for(self, num_tokens: int) -> int:
        """Logical blocks that ``num_tokens`` fill."""
        return ceil_div(num_tokens, self.block_size)

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` blocks can be allocated; if not at once, then after all windows gave back what they
        can."""
        if count > self.pool.num_available:
            self.expire_all()
        return count <= self.pool.num_available

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds on its way."""
        num_logical = ceil_div(num_tokens, self.block_size)
        if not self._has_windows:
            return num_logical * self.num_groups
        return self.windows.most_blocks(num_logical, self._max_chunk)

    def chunk_limit(self, num_held: int, num_logical: int, start: int) -> int:
        """Return the most tokens from ``start`` on that a sequence can be given in one step, with the whole pool to
        itself.  It holds ``num_held`` blocks, and its tables have ``num_logical`` logical blocks.  Without windows a
        chunk may be as long as the rest of the prompt: smaller chunks would need as many blocks."""
        if not self._has_windows:
            return self._max_chunk
        spare = (self.pool.num_blocks - num_held) // self.num_groups
        return min(self._max_chunk, (num_logical + spare) * self.block_size - start)

    def next_chunk_limit(self, row: int) -> int:
        """``chunk_limit`` of a row's next chunk, after its windows gave back what they left behind."""
        if not self._has_windows:
            return self._max_chunk
        rows = self._rows
        start, num_logical = rows.num_scheduled[row : row + 1], int(rows.num_blocks[row])
        self.expire(np.array([row]), start)
        num_held = num_logical * self.num_groups - int(rows.first_block[row].sum())
        return self.chunk_limit(num_held, num_logical, int(start[0]))

    def find_hits(self, sequence: Sequence) -> Hits:
        """Return the cached K/V of a waiting sequence's first tokens; at least one token is left to compute."""
        if not self._caching or sequence.wants_all_positions:
            return Hits(self._nothing, sequence.group.cache_key)
        return self.find_prefix(sequence.group.cache_key, sequence.token_ids, reads_all=self.tier.reads_all(sequence))

    def find_prefix(self, cache_key: str, token_ids: IntArray, *, reads_all: bool = True) -> Hits:
        """Return the cached K/V of the first of ``token_ids`` under a cache key; those that are far away only if
        it ``reads_all``.  At least one token is left to compute."""
        windows, token_bytes = self.windows, token_ids.tobytes()
        usable: int = (len(token_ids) - 1) // self.block_size
        parted: tuple[int, int] | None = None
        if self.snapshots is not None:
            usable, parted = self.snapshots.longest(
                self.cache.stretches(cache_key, token_bytes, usable), self.block_size
            )
        blocks, place = self.cache.match(cache_key, token_bytes, usable)
        may_use = self.tier.may_use(blocks, reads_all=reads_all)
        if self._has_windows or may_use is not None:
            is_there = blocks != NO_BLOCK
            sufficient = windows.longest_hit(is_there if may_use is None else is_there & may_use)
            if sufficient < len(blocks):
                blocks, place = self.cache.match(cache_key, token_bytes, sufficient)
        num_tokens = len(blocks) * self.block_size
        name = self.cache.next_name(place, token_bytes, num_tokens)
        tail, found = None, self.cache.match_tail(place, token_bytes, num_tokens)
        must_load = self.tier.must_load(blocks)  # it might overwrite the tail before the copy
        if found is not None and not must_load:
            tail, num_in_tail = found
            num_tokens += num_in_tail
        shared = self._share(blocks, num_tokens) if len(blocks) else self._nothing
        return Hits(shared, place, num_tokens, tail, name, parted)

    def num_in_use(self, blocks: BlockIds) -> int:
        """Return how many of ``blocks``, which may be below the pool, some row holds."""
        is_below = self.tier.is_below(blocks)
        return int(np.count_nonzero(self.pool.ref_counts[blocks if is_below is None else blocks[~is_below]]))

    def hold(self, shared: Shared) -> tuple[Shared, bool]:
        """Let one more row hold ``shared``: the blocks that it has now, and whether a load must go out before it
        runs."""
        must_load = self.tier.must_load(shared.held)
        shared = self.tier.hold(shared)
        if not must_load:
            self.tier.require(shared.held)
        return shared, must_load

    def seat(self, entries: list[Entry]) -> list[IntArray]:
        """First tables of rows (n, G), int32: the blocks that they share, then new ones."""
        tables: list[IntArray] = []
        lengths = [self.blocks_for(entry.end) for entry in entries]
        num_new = sum(lengths) - sum(len(entry.shared.table) for entry in entries)
        taken = self.allocate(num_new * self.num_groups).reshape(num_new, self.num_groups)
        start = 0
        for entry, length in zip(entries, lengths, strict=True):
            end = start + length - len(entry.shared.table)
            table, row = taken[start:end], entry.sequence.row
            if len(entry.shared.table):
                table = np.concatenate((entry.shared.table, table), dtype=np.int32)
                self._rows.first_block[row] = entry.shared.first
            self._rows.block_table[row, :length] = table
            tables.append(table)
            start = end
        self._set_lengths(np.array([entry.sequence.row for entry in entries]), np.array(lengths))
        return tables

    def donation(self, row: int, num_tokens: int) -> Donation | None:
        """Return what a fork gets that goes on after the first ``num_tokens`` of ``row``.  None if a window left it
        behind, or if a block to copy has not been loaded yet."""
        if (self._rows.first_block[row] > self.windows.first_needed(num_tokens)).any():
            return None
        num_full, num_in_last = divmod(num_tokens, self.block_size)
        table = self._rows.tables(row).astype(np.intp)
        source = table[num_full] if num_in_last else None
        if source is not None:
            if self.tier.must_load(source):
                return None
            self.tier.require(source)
        return Donation(row, self._share(table[:num_full], num_tokens), source)

    def grow(self, row: int, count: int) -> IntArray:
        """``count`` more logical blocks at the end of one row's tables; their ids (count * G,), as in a plan."""
        taken = self.allocate(count * self.num_groups)
        start = int(self._rows.num_blocks[row])
        self._rows.block_table[row, start : start + count] = taken.reshape(count, -1)
        self._set_lengths(row, start + count)
        return taken

    def grow_rows(self, rows: IntArray) -> IntArray:
        """Add a logical block to each of ``rows`` (n,), distinct; return the blocks (n * G,) in order, as in a plan."""
        taken = self.allocate(len(rows) * self.num_groups)
        self._rows.add_blocks(rows, taken)
        return taken

    def expire_all(self) -> None:
        """``expire`` for all rows, as far as they have been scheduled."""
        if self._has_windows:
            rows = self._rows.occupied()
            self.expire(rows, self._rows.num_scheduled[rows])

    def expire(self, rows: npt.NDArray[np.integer], positions: Counts) -> None:
        """Windows of ``rows`` (n,), distinct, give back what lies before them when the next token is at ``positions``.
        The plan in the making is the first that does not read these blocks.  It may give them to other rows, because
        all plans before it have run when it runs."""
        if not self._has_windows:
            return
        left = self._rows.left_behind(rows, self.windows.first_needed(positions))
        if len(left):
            self.pool.release_repeated(left)

    def allocate(self, count: int) -> IntArray:
        """``count`` blocks, int32, that will be entered into tables."""
        taken, lost = self.pool.allocate(count)
        self.tier.give_up(lost)
        self.tier.require(taken)
        return taken.astype(np.int32)

    def publish(self, chunks: Iterable[tuple[Sequence, int]]) -> None:
        """Offer the full blocks of each sequence's first so many tokens to the prefix cache.  They are computed, or
        will be in a step that is already decided.  Requests of that same step may use them, because each layer stores
        the keys and values of all its tokens before any attention."""
        if not self._caching:
            return
        added, lasting = [NO_BLOCKS], [NO_BLOCKS]
        for sequence, num_tokens in chunks:
            end = num_tokens // self.block_size
            if sequence.num_published < end:
                new = self._insert(sequence, end)
                added.append(new)
                if self.tier.outlives_process:
                    row = sequence.row
                    new = new[np.isin(new, self._rows.block_table[row, : self._num_lasting(row, end)])]
                lasting.append(new)
        self.pool.mark_full(np.concatenate(added))
        self.tier.published(np.concatenate(lasting))

    def _insert(self, sequence: Sequence, end: int) -> BlockIds:
        """Publish a sequence's full blocks before block ``end``; returns those that the cache did not have."""
        row, first, size = sequence.row, sequence.num_published, self.block_size
        if is_lost(sequence.place) and not self.windows.has_full:
            first = 0  # the blocks before were left behind, and evicted
            sequence.place = sequence.group.cache_key
        blocks = self._rows.block_table[row, first:end].astype(np.intp)
        if self._has_windows:
            blocks = _without(blocks, self._rows.first_block[row] - first, NO_BLOCK)
        known = self._rows.tokens[row, first * size : end * size].tobytes()
        new, sequence.place = self.cache.insert(blocks, sequence.place, known)
        sequence.num_published = end
        return new

    def publish_tail(self, sequence: Sequence) -> None:
        """Offer the computed tokens in the last, partly filled block of a sequence that is about to be released."""
        row = sequence.row
        computed = int(self._rows.num_computed[row])
        last, num_in_last = divmod(computed, self.block_size)
        is_next = sequence.num_published == last  # not if a step in flight computes more
        if (
            not self._caching
            or self.snapshots is not None
            or not num_in_last
            or not is_next
            or (self._rows.first_block[row] > last).any()
        ):
            return
        blocks = self._rows.block_table[row, last].astype(np.intp)
        tokens = self._rows.tokens[row, computed - num_in_last : computed]
        if self.cache.insert_tail(blocks, sequence.place, tokens.tobytes()):
            self.pool.mark_tail(blocks)

    def release(self, sequence: Sequence) -> None:
        """Give the row's tables back, last block first; cached blocks stay cached until they are needed."""
        self.pool.release(self._rows.held(sequence.row))
        self._set_lengths(sequence.row, 0)

    def clear_cache(self) -> None:
        """Forget all cached prefixes; no row may be running."""
        assert self.pool.num_used == 0
        self.tier.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        self.cache.clear()
        self.pool.forget_content()

    def check_integrity(self) -> None:
        """Assert that pool, cache and tables agree: as many rows hold each block as it counts, all in one group."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        holders: Counter[int] = Counter()
        group_of: dict[int, int] = {}
        for sequence in self._rows.running():
            table, first = self._rows.tables(sequence.row), self._rows.first_block[sequence.row]
            held = self._rows.held(sequence.row).tolist()
            assert len(set(held)) == len(held), f"row {sequence.row} holds a block twice"
            groups = np.broadcast_to(np.arange(self.num_groups), table.shape)
            for block, group in zip(held, self.windows.held(groups, first).tolist(), strict=True):
                assert group_of.setdefault(block, group) == group, f"block {block} is held in two groups"
            holders.update(held)
        assert self.pool.ref_counts.tolist() == [holders[block] for block in range(self.pool.num_blocks)]
        cached = [block for block in self.cache.cached_blocks() if block < self.pool.num_blocks]
        assert np.flatnonzero(self.pool.contents()).tolist() == sorted(cached)
        self.tier.check_integrity()
        for block, group in self.cache.groups().items():
            assert group_of.get(block, group) == group, f"block {block} is cached in another group than it is held in"

    def _num_lasting(self, row: int, num_blocks: int) -> int:
        """Logical blocks among a row's first that have token ids alone: names of other things are this process's own,
        and negative."""
        is_name = self._rows.tokens[row, : num_blocks * self.block_size] < 0
        return int(is_name.argmax()) // self.block_size if is_name.any() else num_blocks

    def _share(self, blocks: BlockIds, num_tokens: int) -> Shared:
        """The part of ``blocks`` (n, G) that a row needs whose next token is at ``num_tokens``."""
        if not self._has_windows:
            return Shared(blocks, self._from_start, blocks.reshape(-1))
        first = self.windows.first_needed(num_tokens)
        return Shared(_without(blocks, first, 0), first, self.windows.held(blocks, first))

    def _set_lengths(self, rows: int | BlockIds, num_blocks: int | npt.NDArray[np.int64]) -> None:
        self._rows.num_blocks[rows] = num_blocks
        self._rows.capacity[rows] = num_blocks * self.block_size


def _without(blocks: BlockIds, first: Counts, filler: int) -> BlockIds:
    """``blocks`` (n, G) with ``filler`` before those with the numbers ``first`` (G,)."""
    return np.where(np.arange(len(blocks))[:, None] < first, filler, blocks)
