"""The running batch as arrays indexed by row, so that a steady decode step is a few array operations.

One row's tokens and the counters over them::

    token ids    | prompt ............ | generated ............. |          (buffer goes on to max_sequence_tokens)
                                                                 ^ num_tokens     known to the host
                                                ^ num_scheduled                   K/V there once all plans have run
                                     ^ num_computed                               K/V there, confirmed by update()
    block table  | b0 | b1 | b2 | ........ | bk |      of each group of layers
                             ^ first_block      ^ num_blocks * block_size = capacity

A row has a table in each of the model's G groups of layers.  They grow together, so ``num_blocks`` counts *logical*
blocks, each of which is one block of the pool per group.  A group with a window gives blocks back from the front: it
holds those from its ``first_block`` on, and the entries before that are stale.  In a full group that is always 0.

Always num_computed <= num_scheduled <= capacity.  A row in PREFILL has num_scheduled < num_tokens.  One in DECODE has
num_scheduled >= num_tokens - 1: steps in flight still owe it num_scheduled - num_tokens + 1 tokens.  One in ENDING has
num_scheduled + 1 = max_tokens: nothing is left to schedule.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from tp_engine.plan import NO_IDS, IntArray
from tp_engine.sched.decode_run import DecodeRun, RowSet
from tp_engine.sched.kv_windows import Counts
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.lru_queue import NO_BLOCKS, BlockIds
from tp_engine.sched.readiness import Blocked, Readiness
from tp_engine.sched.sequence import NO_ROW, Entry, Sequence, SequencePhase

NO_ROWS = RowSet(NO_IDS, [], is_rising=True)

_VACANT_STEP = np.iinfo(np.int64).max
_ONE = np.ones((), dtype=np.int64)  # numpy adds an array in two thirds of the time that it takes for a Python number


class RowState:
    """The sequence at each row.  All counters are int64 (rows,); ``tokens`` is int32 (rows, width), ``block_table``
    int32 (rows, logical blocks, G), ``first_block`` int64 (rows, G).

    ``since_step`` is the step that admitted the row's occupant: results of earlier steps are not for it.
    ``num_departures`` counts the rows ever vacated, ``num_ending`` the rows in ENDING.  ``readiness`` says which rows
    can not be scheduled now.

    ``run`` is the run of steps that the rows in DECODE are in.  What steady steps change is only noted there.  It is
    entered into the arrays when one of them is asked for, so that they always look complete from outside.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        rows = limits.max_num_seqs
        # np.empty: the pages of a row are touched when its tokens arrive.
        self._tokens: IntArray = np.empty((rows, limits.max_sequence_tokens), dtype=np.int32)
        self._flat_tokens = self._tokens.reshape(-1)
        self._first_tokens = np.arange(rows, dtype=np.int64) * limits.max_sequence_tokens
        self._block_table: IntArray = np.empty((rows, limits.max_blocks_per_row, limits.num_groups), dtype=np.int32)
        self._num_tokens = np.zeros(rows, dtype=np.int64)
        self._num_scheduled = np.zeros(rows, dtype=np.int64)
        self._num_computed = np.zeros(rows, dtype=np.int64)
        self._num_blocks = np.zeros(rows, dtype=np.int64)
        self._capacity = np.zeros(rows, dtype=np.int64)
        self.first_block = np.zeros((rows, limits.num_groups), dtype=np.int64)
        self.max_tokens = np.zeros(rows, dtype=np.int64)
        self.num_logprobs = np.full(rows, -1, dtype=np.int64)
        self.since_step = np.full(rows, _VACANT_STEP, dtype=np.int64)
        self.phase: npt.NDArray[np.int8] = np.zeros(rows, dtype=np.int8)
        self.sequences: list[Sequence | None] = [None] * rows
        self.run: DecodeRun | None = None
        self.num_running = 0
        self.readiness = Readiness(rows)
        self.num_departures = 0
        self.num_ending = 0
        self._windows = limits.kv_windows
        self._block_size = limits.block_size
        self._vacant = list(range(rows))
        self._prefilling: dict[int, Sequence] = {}
        self._num_runs = 0
        self._has_notes = False

    # The arrays that notes are for.

    @property
    def tokens(self) -> IntArray:
        """Token ids of each row, of which the first ``num_tokens`` are known."""
        if self._has_notes:
            self._settle()
        return self._tokens

    @property
    def block_table(self) -> IntArray:
        """Each row's tables, logical block by logical block; the first ``num_blocks`` of them count."""
        if self._has_notes:
            self._settle()
        return self._block_table

    @property
    def num_tokens(self) -> Counts:
        """Tokens that the host knows."""
        if self._has_notes:
            self._settle()
        return self._num_tokens

    @property
    def num_scheduled(self) -> Counts:
        """Tokens that have K/V once all plans have run."""
        if self._has_notes:
            self._settle()
        return self._num_scheduled

    @property
    def num_computed(self) -> Counts:
        """Tokens that have K/V, as far as results have come."""
        if self._has_notes:
            self._settle()
        return self._num_computed

    @property
    def num_blocks(self) -> Counts:
        """Logical blocks in the row's tables."""
        if self._has_notes:
            self._settle()
        return self._num_blocks

    @property
    def capacity(self) -> Counts:
        """Tokens that ``num_blocks`` hold."""
        if self._has_notes:
            self._settle()
        return self._capacity

    @property
    def num_vacant(self) -> int:
        return len(self._vacant)

    def occupy(self, entries: list[Entry], step_id: int) -> None:
        """Seat waiting sequences, each at the lowest vacant row."""
        for entry in entries:
            sequence = entry.sequence
            sequence.row = row = heapq.heappop(self._vacant)
            sequence.phase = SequencePhase.PREFILL
            self.tokens[row, : len(sequence.token_ids)] = sequence.token_ids
            self.sequences[row] = self._prefilling[row] = sequence
            self.readiness.occupy(row, is_constrained=sequence.constraint is not None)
        seated = [entry.sequence for entry in entries]
        rows = np.array([sequence.row for sequence in seated])
        self.num_tokens[rows] = [len(sequence.token_ids) for sequence in seated]
        self.num_scheduled[rows] = self.num_computed[rows] = [entry.num_computed for entry in entries]
        self.max_tokens[rows] = [sequence.max_tokens for sequence in seated]
        self.num_logprobs[rows] = [sequence.sampling.logprobs for sequence in seated]
        self.since_step[rows] = step_id
        self.phase[rows] = SequencePhase.PREFILL
        self.num_running += len(entries)

    def start_decoding(self, rows: npt.NDArray[np.intp]) -> None:
        """All known tokens of ``rows`` have been scheduled: from now on one token per step."""
        self.phase[rows] = SequencePhase.DECODE
        for row in rows.tolist():
            self._prefilling.pop(row).phase = SequencePhase.DECODE
        for sequence in self._look_up(rows[self.num_scheduled[rows] + _ONE >= self.max_tokens[rows]]):
            self._end(sequence)
        self._end_run()

    def advance_decodes(self, chosen: RowSet) -> None:
        """One more token of each of ``chosen``, which are in DECODE, is scheduled; some reach their end with it."""
        self.num_scheduled[chosen.place] += _ONE
        if self.run is not None and chosen.epoch == self.run.rows.epoch:
            self.run.advance()
            if self.run.num_steps_left > 0:
                return
        ending = chosen.rows[self.num_scheduled[chosen.place] + 1 >= self.max_tokens[chosen.place]]
        for sequence in self._look_up(ending):
            self._end(sequence)
        self._end_run()

    def at_block_end(self, chosen: RowSet) -> IntArray:
        """Those of the rows ``chosen`` whose next token needs a new block."""
        if self.run is not None and chosen.epoch == self.run.rows.epoch:
            return self.run.growing()
        rows = chosen.rows
        needing: IntArray = rows[self.capacity[rows] == self.num_scheduled[rows]]
        return needing

    def append(self, chosen: RowSet, token_ids: IntArray) -> Counts:
        """Each row of ``chosen`` has one more token, and all before it are computed; how many each has now."""
        if self._has_notes:
            self._settle()
        return self._append_steps(chosen, token_ids[None])

    def add_blocks(self, rows: IntArray, blocks: IntArray) -> None:
        """Each of ``rows`` (n,), distinct, has one more logical block at the end of its tables; ``blocks`` (n * G,)."""
        if self._has_notes:
            self._settle()
        self._add_blocks(rows, blocks)

    def note_plan(self, run: DecodeRun, grown: IntArray, blocks: IntArray) -> None:
        """One more token of each row of ``run``, the present one, is scheduled; the rows ``grown`` took ``blocks``."""
        run.note_plan(grown, blocks)
        self._has_notes = True
        if run.is_full:
            self._settle()

    def note_result(self, run: DecodeRun, token_ids: IntArray) -> None:
        """Each row of ``run``, the present one, has one more token, and all before it are computed."""
        run.note_result(token_ids)
        self._has_notes = True
        if run.is_full:
            self._settle()

    def ends_of_full(self, rows: IntArray) -> Counts:
        """The position of the next token of each of ``rows``, which have filled their last block.

        It is their capacity.  Notes do not change it: they are of fewer steps than a block has tokens, so the last
        block of such a row has been entered.
        """
        ends: Counts = self._capacity[rows]
        return ends

    def left_behind(self, rows: npt.NDArray[np.integer], first: Counts) -> BlockIds:
        """Each of ``rows`` (n,), distinct, gives back its blocks before ``first`` (n, G); these, with repetitions.

        Notes need not be entered for that: no window leaves a block behind that is only noted.
        """
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

    def vacate(self, sequence: Sequence, phase: SequencePhase) -> None:
        """The sequence leaves its row, to wait again or for good; its tokens go with it."""
        self._end_run()
        row = sequence.row
        self.num_departures += 1
        self.num_ending -= sequence.phase is SequencePhase.ENDING
        self.readiness.vacate(row)
        sequence.token_ids = self.tokens[row, : self.num_tokens[row]].copy()
        sequence.phase = phase
        sequence.row = NO_ROW
        self.phase[row] = SequencePhase.WAITING
        self.since_step[row] = _VACANT_STEP
        self.sequences[row] = None
        self.num_blocks[row] = self.capacity[row] = self.first_block[row] = 0
        self.num_tokens[row] = self.num_scheduled[row] = self.num_computed[row] = 0
        self._prefilling.pop(row, None)
        self.num_running -= 1
        heapq.heappush(self._vacant, row)

    def decoding(self) -> RowSet:
        """The rows in DECODE, rising; of the same epoch as long as none joins or leaves.  Not to be changed."""
        if self.run is None:
            self.run = self._begin_run()
        return self.run.rows

    def ready_decodes(self) -> RowSet:
        """``decoding()`` without the rows that are blocked."""
        chosen = self.decoding()
        if self.readiness.num_blocked and not (are_ready := self.readiness.are_ready(chosen.rows)).all():
            return self.row_set(chosen.rows[are_ready])
        return chosen

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    def prefilling(self) -> list[Sequence]:
        """Sequences in PREFILL that are not blocked, first in order first."""
        if not self._prefilling:
            return []
        found = [one for row, one in self._prefilling.items() if not self.readiness.bits[row]]
        return sorted(found, key=lambda sequence: sequence.key)

    def loading(self) -> list[Sequence]:
        """Sequences that wait for loads from the host tier, first in order first."""
        rows = np.flatnonzero(self.readiness.bits & Blocked.LOADING.value)
        return sorted(self._look_up(rows), key=lambda sequence: sequence.key)

    def occupied(self) -> npt.NDArray[np.intp]:
        """The rows that have a sequence, in rising order."""
        return np.flatnonzero(self.phase != SequencePhase.WAITING)

    def running(self) -> list[Sequence]:
        """All sequences that have a row, by row."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def row_set(self, rows: IntArray, epoch: int = 0) -> RowSet:
        """``rows``, which must be occupied, and are those of the run of this ``epoch``, if there is one."""
        if self.run is not None and epoch == self.run.rows.epoch:
            return self.run.rows
        return RowSet(rows, self._look_up(rows))

    def tables(self, row: int) -> IntArray:
        """A copy of the row's tables (n, G), logical block by logical block."""
        return self.block_table[row, : self.num_blocks[row]].copy()

    def held(self, row: int) -> BlockIds:
        """The blocks that the row holds in all groups, logical block by logical block."""
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

    def check_integrity(self, block_size: int) -> None:
        """Assert that the arrays, the sequences and the caches of this class agree."""
        occupied = self.running()
        vacant = [row for row, sequence in enumerate(self.sequences) if sequence is None]
        assert sorted(self._vacant) == vacant and len(occupied) == self.num_running
        assert all(self.sequences[s.row] is s and self.phase[s.row] == s.phase for s in occupied)
        assert all(s.phase in (SequencePhase.PREFILL, SequencePhase.DECODE, SequencePhase.ENDING) for s in occupied)
        assert np.all(self.since_step[vacant] == _VACANT_STEP) and np.all(self.phase[vacant] == SequencePhase.WAITING)
        assert np.all(self.num_blocks[vacant] == 0)
        self.readiness.check_integrity([s.row for s in occupied if s.constraint is not None], vacant)
        assert self.num_ending == sum(s.phase is SequencePhase.ENDING for s in occupied)
        assert np.array_equal(self.capacity, self.num_blocks * block_size)
        assert np.all(self.num_computed <= self.num_scheduled) and np.all(self.num_scheduled <= self.capacity)
        assert np.all(self.first_block <= self._windows.first_needed(self.num_scheduled)), "a row lacks a block"
        for s in occupied:
            scheduled, known = int(self.num_scheduled[s.row]), int(self.num_tokens[s.row])
            assert scheduled < known if s.phase is SequencePhase.PREFILL else scheduled >= known - 1
            assert (scheduled + 1 >= self.max_tokens[s.row]) == (
                s.phase is SequencePhase.ENDING
            ) or s.phase is SequencePhase.PREFILL
        decoding = self.decoding()
        assert list(decoding.rows) == [s.row for s in occupied if s.phase is SequencePhase.DECODE]
        assert decoding.sequences == [s for s in occupied if s.phase is SequencePhase.DECODE]
        assert sorted(self._prefilling) == [s.row for s in occupied if s.phase is SequencePhase.PREFILL]

    def _settle(self) -> None:
        """Enter what has been noted of the run."""
        run = self.run
        assert run is not None
        self._num_scheduled[run.rows.place] += run.num_planned
        if run.grown_rows:
            self._add_blocks(np.concatenate(run.grown_rows), np.concatenate(run.grown_blocks))
        if run.num_results:
            self._append_steps(run.rows, run.results[: run.num_results])
        run.forget_notes()
        self._has_notes = False

    def _add_blocks(self, rows: IntArray, blocks: IntArray) -> None:
        index = rows.astype(np.intp)
        counts = self._num_blocks[index]
        self._block_table[index, counts] = blocks.reshape(len(index), -1)
        counts += 1
        self._num_blocks[index] = counts
        self._capacity[index] = counts * self._block_size

    def _append_steps(self, chosen: RowSet, results: IntArray) -> Counts:
        """As ``append``, with the tokens of several steps, (steps, rows)."""
        place = chosen.place
        known = self._num_tokens[place]
        steps = np.arange(len(results))[:, None]
        self._flat_tokens[self._first_tokens[place] + known + steps] = results
        lengths = known + len(results)
        self._num_computed[place] = lengths - _ONE
        self._num_tokens[place] = lengths
        return lengths

    def _begin_run(self) -> DecodeRun:
        index = np.flatnonzero(self.phase == SequencePhase.DECODE)
        rows = index.astype(np.int32)
        scheduled = self.num_scheduled[index]
        steps = self.max_tokens[index] - _ONE - scheduled
        self._num_runs += 1
        return DecodeRun(
            RowSet(rows, self._look_up(rows), epoch=self._num_runs, is_rising=True),
            room=self.capacity[index] - scheduled,
            num_steps=int(steps.min(initial=np.iinfo(np.int64).max)),
            block_size=self._block_size,
        )

    def _end_run(self) -> None:
        if self._has_notes:
            self._settle()
        self.run = None

    def _end(self, sequence: Sequence) -> None:
        self.phase[sequence.row] = sequence.phase = SequencePhase.ENDING
        self.num_ending += 1

    def _look_up(self, rows: IntArray | npt.NDArray[np.intp]) -> list[Sequence]:
        found = [self.sequences[row] for row in rows.tolist()]
        return [sequence for sequence in found if sequence is not None]
