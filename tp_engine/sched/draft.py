"""A step plan in the making."""

from __future__ import annotations

import msgspec
import numpy as np

from tp_engine.plan import NO_FLAGS, NO_IDS, NO_PAIRS, Admission, BoolArray, IntArray, StepPlan
from tp_engine.sched.lru_queue import BlockIds
from tp_engine.sched.row_state import RowState
from tp_engine.sched.sequence import Sequence, SequencePhase


class StepDraft(msgspec.Struct):
    """What has been decided so far.  ``budget`` tokens may still be scheduled.

    ``may_preempt``: no step is in flight, so that nobody can be about to give blocks back by ending.  ``short``:
    somebody running lacked blocks, so nobody new may enter in this step.  ``stalled``: the step must wait for the
    results in flight.
    """

    step_id: int
    budget: int
    may_preempt: bool = True
    short: bool = False
    stalled: bool = False
    decode_rows: IntArray = NO_IDS
    block_rows: IntArray = NO_IDS
    block_ids: IntArray = NO_IDS
    prefills: list[tuple[Sequence, int]] = []
    admitted: list[Admission] = []
    copies: list[tuple[int, int]] = []

    def add_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """New logical blocks of rows (n,) that have been in the batch before; ``block_ids`` (n * G,)."""
        if len(self.block_rows):
            rows = np.concatenate((self.block_rows, rows))
            block_ids = np.concatenate((self.block_ids, block_ids))
        self.block_rows, self.block_ids = rows, block_ids

    def add_copies(self, sources: BlockIds, targets: IntArray) -> None:
        """Each target (G,) begins as its source, which is the target itself if that was free to be taken."""
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self.copies += [(source, target) for source, target in pairs if source != target]

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next ``num_tokens`` of a sequence."""
        self.prefills.append((sequence, num_tokens))
        self.budget -= num_tokens

    def drop_preempted(self, rows: RowState) -> None:
        """Take back what was decided for rows that have since been preempted; call before anybody enters."""
        self.decode_rows = self.decode_rows[rows.phase[self.decode_rows] == SequencePhase.DECODE]
        kept = rows.phase[self.block_rows] != SequencePhase.WAITING
        if not kept.all():
            block_ids = self.block_ids.reshape(len(kept), -1)[kept]
            self.block_rows, self.block_ids = self.block_rows[kept], block_ids.reshape(-1)

    def advance(self, rows: RowState, released: list[int]) -> StepPlan | None:
        """Count everything decided as scheduled and make the plan; None if there is nothing to run."""
        if not (len(self.decode_rows) or self.prefills):
            return None
        if len(self.decode_rows):
            rows.advance_decodes(self.decode_rows)
        if not self.prefills:
            return self._plan(released, NO_IDS, NO_IDS, NO_FLAGS)
        prefilled = np.array([sequence.row for sequence, _ in self.prefills])
        num_tokens = np.array([count for _, count in self.prefills])
        rows.num_scheduled[prefilled] += num_tokens
        samples: BoolArray = rows.num_tokens[prefilled] == rows.num_scheduled[prefilled]
        if samples.any():
            rows.start_decoding(prefilled[samples])
        return self._plan(released, prefilled.astype(np.int32), num_tokens.astype(np.int32), samples)

    def _plan(
        self, released: list[int], prefill_rows: IntArray, prefill_tokens: IntArray, samples: BoolArray
    ) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            released=np.array(released, dtype=np.int32) if released else NO_IDS,
            admitted=tuple(self.admitted),
            block_rows=self.block_rows,
            block_ids=self.block_ids,
            copies=np.array(self.copies, dtype=np.int32) if self.copies else NO_PAIRS,
            decode_rows=self.decode_rows,
            prefill_rows=prefill_rows,
            prefill_tokens=prefill_tokens,
            prefill_samples=samples,
        )
