"""The running batch: which sequence sits at which row, in which phase, and which rows decode together.

The rows' tokens, tables and counters are arrays (``row_arrays``), so that a steady decode step is a few array
operations.  Always num_computed <= num_scheduled <= capacity.  A row in PREFILL has num_scheduled < num_tokens.  One in
DECODE has num_scheduled >= num_tokens - 1: steps in flight still owe it num_scheduled - num_tokens + 1 tokens.  One in
ENDING has num_scheduled + 1 = max_total_tokens: nothing is left to schedule.
"""

import heapq

import numpy as np
import numpy.typing as npt

from tp_engine.plan import NO_IDS, IntArray
from tp_engine.sched.decode_run import DecodeRun, RowSet
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.readiness import Blocked, Readiness
from tp_engine.sched.row_arrays import ONE, RowArrays
from tp_engine.sched.sequence import NO_ROW, Entry, Sequence, SequencePhase

NO_ROWS = RowSet(NO_IDS, [], is_rising=True)

_VACANT_STEP = np.iinfo(np.int64).max


class RunningBatch(RowArrays):
    """The sequence at each row, beside the row's arrays.

    ``since_step`` is the step that admitted the row's occupant: results of earlier steps are not for it.
    ``num_departures`` counts the rows ever vacated, ``num_ending`` the rows in ENDING.  ``prefilling_rows`` has the
    sequences in PREFILL, by row.  ``readiness`` says which rows cannot be scheduled now.  ``run`` is the run of steps
    that the rows in DECODE are in.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        rows = limits.max_num_seqs
        self.max_total_tokens = np.zeros(rows, dtype=np.int64)
        self.num_logprobs = np.full(rows, -1, dtype=np.int64)
        self.since_step = np.full(rows, _VACANT_STEP, dtype=np.int64)
        self.phase: npt.NDArray[np.int8] = np.zeros(rows, dtype=np.int8)
        self.sequences: list[Sequence | None] = [None] * rows
        self.run: DecodeRun | None = None
        self.num_running = 0
        self.readiness = Readiness(rows)
        self.num_departures = 0
        self.num_ending = 0
        self._vacant = list(range(rows))
        self.prefilling_rows: dict[int, Sequence] = {}
        self._num_runs = 0

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
            self.sequences[row] = self.prefilling_rows[row] = sequence
            self.readiness.occupy(row, is_constrained=sequence.group.request.is_constrained)
        seated = [entry.sequence for entry in entries]
        rows = np.array([sequence.row for sequence in seated])
        self.num_tokens[rows] = [len(sequence.token_ids) for sequence in seated]
        self.num_scheduled[rows] = self.num_computed[rows] = [entry.num_computed for entry in entries]
        self.max_total_tokens[rows] = [sequence.max_total_tokens for sequence in seated]
        self.num_logprobs[rows] = [sequence.sampling.logprobs for sequence in seated]
        self.since_step[rows] = step_id
        self.phase[rows] = SequencePhase.PREFILL
        self.num_running += len(entries)

    def start_decoding(self, rows: npt.NDArray[np.intp]) -> None:
        """Let ``rows`` decode: all their known tokens have been scheduled, and from now on it is one per step."""
        self.phase[rows] = SequencePhase.DECODE
        for row in rows.tolist():
            self.prefilling_rows.pop(row).phase = SequencePhase.DECODE
        for sequence in self._look_up(rows[self.num_scheduled[rows] + ONE >= self.max_total_tokens[rows]]):
            self._end(sequence)
        self.end_run()

    def advance_decodes(self, chosen: RowSet) -> None:
        """Schedule one more token of each of ``chosen``, which are in DECODE; some reach their end with it."""
        self.num_scheduled[chosen.place] += ONE
        if self.run is not None and chosen.epoch == self.run.rows.epoch:
            self.run.advance()
            if self.run.num_steps_left > 0:
                return
        ending = chosen.rows[self.num_scheduled[chosen.place] + 1 >= self.max_total_tokens[chosen.place]]
        for sequence in self._look_up(ending):
            self._end(sequence)
        self.end_run()

    def at_block_end(self, chosen: RowSet) -> IntArray:
        """Return the rows of ``chosen`` whose next token needs a new block."""
        if self.run is not None and chosen.epoch == self.run.rows.epoch:
            return self.run.growing()
        rows = chosen.rows
        needing: IntArray = rows[self.capacity[rows] == self.num_scheduled[rows]]
        return needing

    def vacate(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Take the sequence out of its row, to wait again or for good; its tokens go with it."""
        self.end_run()
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
        self.prefilling_rows.pop(row, None)
        self.num_running -= 1
        heapq.heappush(self._vacant, row)

    def decoding(self) -> RowSet:
        """Return the rows in DECODE, rising; of the same epoch as long as none joins or leaves.  Not to be changed."""
        if self.run is None:
            self.run = self._begin_run()
        return self.run.rows

    def ready_decodes(self) -> RowSet:
        """``decoding()`` without the rows that are blocked."""
        chosen = self.decoding()
        if self.readiness.num_blocked and not (are_ready := self.readiness.are_ready(chosen.rows)).all():
            return self.row_set(chosen.rows[are_ready])
        return chosen

    def prefilling(self) -> list[Sequence]:
        """Sequences in PREFILL that are not blocked, first in order first."""
        if not self.prefilling_rows:
            return []
        found = [one for row, one in self.prefilling_rows.items() if not self.readiness.bits[row]]
        return sorted(found, key=lambda sequence: sequence.key)

    def loading(self) -> list[Sequence]:
        """Sequences that wait for loads from the host tier, first in order first."""
        rows = np.flatnonzero(self.readiness.bits & Blocked.LOADING.value)
        return sorted(self._look_up(rows), key=lambda sequence: sequence.key)

    def occupied(self) -> npt.NDArray[np.intp]:
        """Return the rows that have a sequence, in rising order."""
        return np.flatnonzero(self.phase != SequencePhase.WAITING)

    def running(self) -> list[Sequence]:
        """Return all sequences that have a row, by row."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def row_set(self, rows: IntArray, epoch: int = 0) -> RowSet:
        """``rows``, which must be occupied, and are those of the run of this ``epoch``, if there is one."""
        if self.run is not None and epoch == self.run.rows.epoch:
            return self.run.rows
        return RowSet(rows, self._look_up(rows))

    def check_integrity(self, block_size: int) -> None:
        """Assert that the arrays, the sequences and the caches of this class agree."""
        occupied = self.running()
        vacant = [row for row, sequence in enumerate(self.sequences) if sequence is None]
        assert sorted(self._vacant) == vacant and len(occupied) == self.num_running
        assert all(self.sequences[s.row] is s and self.phase[s.row] == s.phase for s in occupied)
        assert all(s.phase in (SequencePhase.PREFILL, SequencePhase.DECODE, SequencePhase.ENDING) for s in occupied)
        assert np.all(self.since_step[vacant] == _VACANT_STEP) and np.all(self.phase[vacant] == SequencePhase.WAITING)
        assert np.all(self.num_blocks[vacant] == 0)
        self.readiness.check_integrity([s.row for s in occupied if s.group.request.is_constrained], vacant)
        assert self.num_ending == sum(s.phase is SequencePhase.ENDING for s in occupied)
        assert np.array_equal(self.capacity, self.num_blocks * block_size)
        assert np.all(self.num_computed <= self.num_scheduled) and np.all(self.num_scheduled <= self.capacity)
        assert np.all(self.first_block <= self._windows.first_needed(self.num_scheduled)), "a row lacks a block"
        for s in occupied:
            scheduled, known = int(self.num_scheduled[s.row]), int(self.num_tokens[s.row])
            assert scheduled < known if s.phase is SequencePhase.PREFILL else scheduled >= known - 1
            assert (scheduled + 1 >= self.max_total_tokens[s.row]) == (
                s.phase is SequencePhase.ENDING
            ) or s.phase is SequencePhase.PREFILL
        decoding = self.decoding()
        assert list(decoding.rows) == [s.row for s in occupied if s.phase is SequencePhase.DECODE]
        assert decoding.sequences == [s for s in occupied if s.phase is SequencePhase.DECODE]
        assert sorted(self.prefilling_rows) == [s.row for s in occupied if s.phase is SequencePhase.PREFILL]

    def _begin_run(self) -> DecodeRun:
        index = np.flatnonzero(self.phase == SequencePhase.DECODE)
        rows = index.astype(np.int32)
        scheduled = self.num_scheduled[index]
        steps = int((self.max_total_tokens[index] - ONE - scheduled).min(initial=np.iinfo(np.int64).max))
        room = self.capacity[index] - scheduled
        if room.max(initial=0) >= self._block_size:  # a block was taken for draft tokens that were wrong
            steps = min(steps, self._block_size)
        self._num_runs += 1
        return DecodeRun(
            RowSet(rows, self._look_up(rows), epoch=self._num_runs, is_rising=True),
            room=room,
            num_steps=steps,
            block_size=self._block_size,
        )

    def end_run(self) -> None:
        """Some rows have taken another number of tokens or blocks than the others."""
        if self._noted is not None:
            self._settle()
        self.run = None

    def _end(self, sequence: Sequence) -> None:
        self.phase[sequence.row] = sequence.phase = SequencePhase.ENDING
        self.num_ending += 1

    def _look_up(self, rows: IntArray | npt.NDArray[np.intp]) -> list[Sequence]:
        found = [self.sequences[row] for row in rows.tolist()]
        return [sequence for sequence in found if sequence is not None]
