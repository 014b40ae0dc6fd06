"""One step's decisions about the running rows: decodes first, then the next chunks of prompts."""

from __future__ import annotations

import numpy as np

from tp_engine.plan import NO_IDS, IntArray
from tp_engine.sched.batch import Batch
from tp_engine.sched.draft import StepDraft
from tp_engine.sched.sequence import Sequence, SequencePhase


class StepBuilder:
    """Serves the running rows in order, and preempts from the other end when blocks run out.

    Progress: the first of all running sequences is never preempted, because it alone always fits into the pool; every
    other gives way to it.  So the first one finishes, and by induction all do.  That it fits has two reasons.  No
    sequence is let in whose tokens need more blocks than the pool has, if those behind windows are given back before
    new ones are taken (``SchedulerLimits.capacity_tokens``).  And a chunk of a prompt is never longer than what fits
    alone, which is at least up to the end of a block (``BlockManager.chunk_limit``).
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = batch.rows
        self._blocks = batch.blocks

    def schedule_decodes(self, draft: StepDraft) -> None:
        """One token for each row in DECODE, as far as the budget goes."""
        rows = self._without_waiting_for_tokens(draft)
        if draft.stalled:
            return
        if len(rows) > draft.budget:
            rows = self._first_in_order(rows, draft.budget)
        if len(rows) == 0:
            return
        crossing = self._rows.at_block_end(rows)
        if len(crossing):
            rows = self._take_blocks(draft, rows, crossing)
        draft.decode_rows = rows
        draft.budget -= len(rows)

    def _take_blocks(self, draft: StepDraft, rows: IntArray, crossing: IntArray) -> IntArray:
        """A logical block for each of ``crossing``; ``rows`` without those that had to give way, none if the step must
        wait."""
        self._blocks.expire(crossing, self._rows.num_scheduled[crossing])
        while not self._blocks.has_room(len(crossing) * self._blocks.num_groups):
            if not draft.may_preempt:
                draft.stalled = True
                return NO_IDS
            self._batch.preempt(self._batch.victim())
            draft.short = True
            rows = rows[self._rows.phase[rows] == SequencePhase.DECODE]
            crossing = self._rows.at_block_end(rows) if len(rows) else NO_IDS
        if len(crossing):
            draft.add_blocks(crossing, self._blocks.grow_rows(crossing))
        return rows

    def _without_waiting_for_tokens(self, draft: StepDraft) -> IntArray:
        """The rows in DECODE but those whose grammar must see a token first that a step in flight computes.

        If these are half of the rows or more, the step waits for that token: running the others alone would cost more.
        """
        rows = self._rows.decode_rows()
        if self._rows.num_constrained and (awaits := self._rows.awaits_token(rows)).any():
            draft.stalled = 2 * int(awaits.sum()) >= len(rows)
            rows = rows[~awaits]
        return rows

    def schedule_prefills(self, draft: StepDraft) -> None:
        """The next chunk of each row in PREFILL, first in order first, as far as budget and blocks go."""
        for sequence in self._rows.prefilling():
            if draft.budget == 0:
                break
            if sequence.phase is not SequencePhase.PREFILL:
                continue
            start = int(self._rows.num_scheduled[sequence.row])
            longest = min(draft.budget, self._blocks.next_chunk_limit(sequence.row))
            chunk = min(int(self._rows.num_tokens[sequence.row]) - start, longest)
            if self._grow(draft, sequence, start + chunk):
                draft.add_prefill(sequence, chunk)
                self._blocks.publish([(sequence, start + chunk)])
        if draft.short:
            draft.drop_preempted(self._rows)

    def _grow(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens; False if the row has to wait for those before it in order."""
        row = sequence.row
        count = self._blocks.blocks_for(num_tokens) - int(self._rows.num_blocks[row])
        while not self._blocks.has_room(count * self._blocks.num_groups):
            draft.short = True
            if not draft.may_preempt:
                return False
            victim = self._batch.victim()
            if victim is sequence:
                return False
            self._batch.preempt(victim)
        if count > 0:
            draft.add_blocks(np.full(count, row, dtype=np.int32), self._blocks.grow(row, count))
        return True

    def _first_in_order(self, rows: IntArray, count: int) -> IntArray:
        chosen = sorted(self._rows.row_set(rows).sequences, key=lambda sequence: sequence.key)[:count]
        return np.array(sorted(sequence.row for sequence in chosen), dtype=np.int32)
