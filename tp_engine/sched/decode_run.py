"""Some rows of the batch, and a run of steps in which the same rows decode."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.sched.sequence import Sequence

_MOST_STEPS = 32  # notes of more steps would take too long to enter in one step


class RowSet:
    """``rows`` (n,) int32 and the ``sequences`` that sit there, in the rows' order.

    ``epoch`` is the number of a run's rows (``StepPlan.rows_epoch``), and 0 for other rows.

    ``place`` indexes these rows in an array over all rows: a slice if ``rows`` are rising and without gaps, as they
    mostly are, because numpy takes a fraction of the time for it; else indices (n,) intp.
    """

    def __init__(self, rows: IntArray, sequences: list[Sequence], *, epoch: int = 0, is_rising: bool = False) -> None:
        self.rows, self.sequences, self.epoch = rows, sequences, epoch
        first, count = int(rows[0]) if len(rows) else 0, len(rows)
        follow = is_rising and (count == 0 or int(rows[-1]) - first + 1 == count)
        self.place: slice | npt.NDArray[np.intp] = slice(first, first + count) if follow else rows.astype(np.intp)

    @cached_property
    def names(self) -> tuple[list[str], list[int]]:
        """Request id of each sequence, and its index among the request's.  Not to be changed."""
        return [one.request_id for one in self.sequences], [one.index for one in self.sequences]


class DecodeRun:
    """``rows`` decode, one token each per step, until one of them reaches its end or leaves, or another joins.

    So all steps of the run are known when it begins.  Row i needs a new block in step ``room[i]``, counted from 0, and
    in every ``block_size``-th step after that; ``num_steps`` steps on, the first row reaches its end.
    A run with more ``room`` than a block has ends before that is used up.

    What a step changes may be *noted* here instead of being entered into the arrays of ``RunningBatch`` at once, which
    then enters it for many steps together: ``num_planned`` more tokens of each row are scheduled, for which
    ``grown_rows`` took ``grown_blocks``, G for each row and no row twice, and the rows got the first ``num_results`` of
    ``results``, (steps, rows) int32.
    """

    def __init__(self, rows: RowSet, room: npt.NDArray[np.int64], num_steps: int, block_size: int) -> None:
        self.rows = rows
        self.num_steps_left = num_steps
        self.num_planned = 0
        self.num_results = 0
        self.is_full = False  # the notes must be entered before more are taken
        self._most_planned = min(_MOST_STEPS, block_size)
        self.results: IntArray = np.empty((_MOST_STEPS, len(rows.rows)), dtype=np.int32)
        self.grown_rows: list[IntArray] = []
        self.grown_blocks: list[IntArray] = []
        self._room = room
        self._growing: list[IntArray | None] = [None] * block_size
        self._place_in_block = 0

    def growing(self) -> IntArray:
        """Return the rows that need a new block in the next step.  Not to be changed."""
        found = self._growing[self._place_in_block]
        if found is None:
            found = self.rows.rows[self._room == self._place_in_block]
            self._growing[self._place_in_block] = found
        return found

    def advance(self) -> None:
        """Schedule one more token of each row."""
        self.num_steps_left -= 1
        self._place_in_block = (self._place_in_block + 1) % len(self._growing)

    def note_plan(self, grown: IntArray, blocks: IntArray) -> None:
        """``advance``; the rows ``grown`` took ``blocks`` for it."""
        self.advance()
        self.num_planned += 1
        if self.num_planned == self._most_planned:
            self.is_full = True
        if len(grown):
            self.grown_rows.append(grown)
            self.grown_blocks.append(blocks)

    def note_result(self, token_ids: IntArray) -> None:
        """Keep the rows' ``token_ids`` (rows,), whose memory may be used again."""
        self.results[self.num_results] = token_ids
        self.num_results += 1
        if self.num_results == _MOST_STEPS:
            self.is_full = True

    def forget_notes(self) -> None:
        """Begin anew, once all notes have been entered."""
        self.num_planned = self.num_results = 0
        self.is_full = False
        self.grown_rows.clear()
        self.grown_blocks.clear()
