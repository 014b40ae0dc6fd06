"""Token ids, block tables and counters of the running batch as arrays indexed by row.

One row's tokens and the counters over them::

    token ids    | prompt ............ | generated ............. |          (buffer goes on to max_sequence_tokens + 1)
                                                                 ^ num_tokens     known to the host
                                                ^ num_scheduled                   K/V there once all plans have run
                                     ^ num_computed                               K/V there, confirmed by update()
    block table  | b0 | b1 | b2 | ........ | bk |      of each group of layers
                             ^ first_block      ^ num_blocks * block_size = capacity

A row has a table in each of the model's G groups of layers.  They grow together, so ``num_blocks`` counts *logical*
blocks, each of which is one block of the pool per group.  A group with a window gives blocks back from the front: it
holds those from its ``first_block`` on, and the entries before that are stale.  In a full group that is always 0.

What steady steps change is only noted in their run (``decode_run``).  It is entered into the arrays when one of them is
asked for, so that they always look complete from outside.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.sched.blocks.kv_windows import Counts
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds
from tp_engine.sched.decode_run import DecodeRun, RowSet
from tp_engine.sched.limits import SchedulerLimits

ONE = np.ones((), dtype=np.int64)  # numpy adds an array in two thirds of the time that it takes for a Python number


_Array = TypeVar("_Array", bound=npt.NDArray[Any])


class _Noted(Generic[_Array]):
    """An array that notes are for, which are entered before it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, rows: RowArrays, owner: type) -> _Array:
        if rows._noted is not None:
            rows._settle()
        array: _Array = getattr(rows, self._name)
        return array


class RowArrays:
    """All counters are int64 (rows,); ``tokens`` is int32 (rows, width), ``block_table`` int32 (rows, logical blocks,
    G), ``first_block`` int64 (rows, G)."""

    tokens = _Noted[IntArray]()  # ids of each row, of which the first num_tokens are known
    block_table = _Noted[IntArray]()  # logical block by logical block: num_blocks count
    num_tokens = _Noted[Counts]()  # that the host knows
    num_scheduled = _Noted[Counts]()  # that have K/V once all plans have run
    num_computed = _Noted[Counts]()  # that have K/V, as far as results have come
    num_blocks = _Noted[Counts]()  # logical blocks in the row's tables
    capacity = _Noted[Counts]()  # tokens that num_blocks hold

    def __init__(self, limits: SchedulerLimits) -> None:
        rows = limits.max_num_seqs
        # np.empty: the pages of a row are touched when its tokens arrive.
        width = limits.max_sequence_tokens + 1  # room for the token after a pooled prompt, which is never read
        self._tokens: IntArray = np.empty((rows, width), dtype=np.int32)
        self._flat_tokens = self._tokens.reshape(-1)
        self._first_tokens = np.arange(rows, dtype=np.int64) * width
        self._block_table: IntArray = np.empty((rows, limits.max_blocks_per_row, limits.num_groups), dtype=np.int32)
        self._num_tokens: Counts = np.zeros(rows, dtype=np.int64)
        self._num_scheduled: Counts = np.zeros(rows, dtype=np.int64)
        self._num_computed: Counts = np.zeros(rows, dtype=np.int64)
        self._num_blocks: Counts = np.zeros(rows, dtype=np.int64)
        self._capacity: Counts = np.zeros(rows, dtype=np.int64)
        self.first_block = np.zeros((rows, limits.num_groups), dtype=np.int64)
        self._windows = limits.kv_windows
        self.block_size = self._block_size = limits.block_size
        self._noted: DecodeRun | None = None  # the run that has notes

    def append(self, chosen: RowSet, token_ids: IntArray) -> Counts:
        """Count one more token in each row of ``chosen``, all before it being computed; return how many each has."""
        if self._noted is not None:
            self._settle()
        return self._append_steps(chosen, token_ids[None])

    def extend(self, row: int, token_ids: IntArray) -> None:
        """Append ``token_ids`` (n,) to a row whose last token alone is not computed; now the last of these is not."""
        known = int(self.num_tokens[row])
        length = known + len(token_ids)
        self._tokens[row, known:length] = token_ids
        self._num_tokens[row] = length
        self._num_scheduled[row] = self._num_computed[row] = length - 1

    def add_blocks(self, rows: IntArray, blocks: IntArray) -> None:
        """Append a logical block to the tables of each of ``rows`` (n,), distinct; ``blocks`` (n * G,)."""
        if self._noted is not None:
            self._settle()
        self._add_blocks(rows, blocks)

    def note(self, run: DecodeRun) -> None:
        """Keep ``run``, the present one, which has a step more to be entered."""
        self._noted = run
        if run.is_full:
            self._settle()

    def ends_of_full(self, rows: IntArray) -> Counts:
        """Return the position of the next token of each of ``rows``, which have filled their last block.  It is their
        capacity.  Notes do not change it: they are of fewer steps than a block has tokens, so the last block of such a
        row has been entered."""
        ends: Counts = self._capacity[rows]
        return ends

    def left_behind(self, rows: npt.NDArray[np.integer], first: Counts) -> BlockIds:
        """Drop the blocks before ``first`` (n, G) from the tables of ``rows`` (n,), distinct; returns them, with
        repetitions.  Notes need not be entered for that: no window leaves a block behind that is only noted."""
        old = self.first_block[rows]
        counts = first - old
        which, groups = np.nonzero(counts)
        if not len(which):
            return NO_BLOCKS
        self.first_block[rows] = first
        counts = counts[which, groups]
        ends = counts.cumsum()
        numbers = np.arange(ends[-1]) + np.repeat(old[which, groups] - ends + counts, counts)
        left: BlockIds = self._block_table[np.repeat(rows[which], counts), numbers, np.repeat(groups, counts)]
        return left.astype(np.intp)

    def tables(self, row: int) -> IntArray:
        """Return a copy of the row's tables (n, G), logical block by logical block."""
        return self.block_table[row, : self.num_blocks[row]].copy()

    def held(self, row: int) -> BlockIds:
        """Return the blocks that the row holds in all groups, logical block by logical block."""
        return self._windows.held(self.tables(row), self.first_block[row]).astype(np.intp)

    def num_live_tokens(self, num_used_blocks: int, block_size: int) -> int:
        """Tokens with K/V in used blocks, in each group, those of shared blocks once: shared blocks are always full, so
        only a row's own last block can be unfilled."""
        if not self._windows.has_windows:
            num_unfilled = int((self.capacity - self.num_computed).sum()) * self.first_block.shape[1]
        else:  # with plans ahead, blocks that a group gave back may not be computed yet
            computed = np.maximum(self.num_computed[:, None], self.first_block * block_size)
            num_unfilled = int((self.capacity[:, None] - computed).sum())
        return num_used_blocks * block_size - num_unfilled

    def _settle(self) -> None:
        """Enter what has been noted of the run."""
        run = self._noted
        assert run is not None
        self._num_scheduled[run.rows.place] += run.num_planned
        if run.grown_rows:
            self._add_blocks(np.concatenate(run.grown_rows), np.concatenate(run.grown_blocks))
        if run.num_results:
            self._append_steps(run.rows, run.results[: run.num_results])
        run.forget_notes()
        self._noted = None

    def _add_blocks(self, rows: IntArray, blocks: IntArray) -> None:
        index = rows.astype(np.intp)
        counts = self._num_blocks[index]
        self._block_table[index, counts] = blocks.reshape(len(index), -1)
        counts += 1
        self._num_blocks[index] = counts
        self._capacity[index] = counts * self._block_size

    def _append_steps(self, chosen: RowSet, results: IntArray) -> Counts:
        """``append`` the tokens of several steps, (steps, rows)."""
        place = chosen.place
        known = self._num_tokens[place]
        steps = np.arange(len(results))[:, None]
        self._flat_tokens[self._first_tokens[place] + known + steps] = results
        lengths = known + len(results)
        self._num_computed[place] = lengths - ONE
        self._num_tokens[place] = lengths
        return lengths
