"""How one step is put together from the running batch: decodes first, then the next chunks of prompts.

::

    Scheduler.schedule
        |
    StepScheduler   schedule_decodes, schedule_prefills ----> StepPlanBuilder ----> StepPlan
    Admitter      admit ------------------------------------^   |
        |                                                       | advance: what was decided counts as scheduled
    SchedulerState   rows, blocks, queue <----------------------+

Rows that enter in this step are the business of ``Admitter`` (``admission``).
"""

from typing import Any

import msgspec
import numpy as np

from tp_engine.plan import NO_FLAGS, NO_IDS, NO_PAIRS, Admission, BoolArray, IntArray, StepPlan
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import identity, is_lost
from tp_engine.sched.decode_run import RowSet
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.running_batch import NO_ROWS, RunningBatch
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence, SequencePhase

_KEPT = 8  # an eighth of what is left of a step


class StepPlanBuilder(msgspec.Struct):
    """A step plan in the making: what has been decided so far.  ``budget`` tokens may still be scheduled.

    ``may_preempt``: no step is in flight whose result could end a sequence and so free blocks.  ``short``: a running
    row lacked blocks, so no sequence may enter in this step.  ``stalled``: the step must wait for the results in
    flight.  ``extensions`` are those that the plan will have.
    """

    step_id: int
    budget: int
    may_preempt: bool = True
    short: bool = False
    stalled: bool = False
    decodes: RowSet = NO_ROWS
    block_rows: IntArray = NO_IDS
    block_ids: IntArray = NO_IDS
    prefills: list[tuple[Sequence, int]] = []
    admitted: list[Admission] = []
    copies: list[tuple[int, int]] = []
    state_copies: list[tuple[int, int]] = []
    snapshots: list[tuple[int, int]] = []
    extensions: dict[str, Any] = {}

    def add_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """New logical blocks of rows (n,) that have been in the batch before; ``block_ids`` (n * G,)."""
        if len(self.block_rows):
            rows = np.concatenate((self.block_rows, rows))
            block_ids = np.concatenate((self.block_ids, block_ids))
        self.block_rows, self.block_ids = rows, block_ids

    def add_copies(self, sources: BlockIds, targets: IntArray) -> None:
        """Let each target (G,) begin as its source; no copy is needed where the source itself was free and is the
        target."""
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self.copies += [(source, target) for source, target in pairs if source != target]

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next ``num_tokens`` of a sequence."""
        self.prefills.append((sequence, num_tokens))
        self.budget -= num_tokens

    def drop_preempted(self, rows: RunningBatch) -> None:
        """Take back what was decided for rows that have since been preempted; call before a sequence enters."""
        decodes = self.decodes.rows
        self.decodes = rows.row_set(decodes[rows.phase[decodes] == SequencePhase.DECODE])
        kept = rows.phase[self.block_rows] != SequencePhase.WAITING
        if not kept.all():
            block_ids = self.block_ids.reshape(len(kept), -1)[kept]
            self.block_rows, self.block_ids = self.block_rows[kept], block_ids.reshape(-1)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to run."""
        return not (len(self.decodes.rows) or self.prefills)

    def advance(self, state: SchedulerState) -> StepPlan | None:
        """Count everything decided as scheduled and make the plan; None if there is nothing to run."""
        if self.is_empty:
            return None
        rows, decodes, released = state.rows, self.decodes, state.released
        state.released = []
        if self.snapshots:
            self._take_snapshots(state)
        if len(decodes.rows):
            rows.advance_decodes(decodes)
        prefill_rows, prefill_tokens, samples = self._advance_prefills(rows)
        return StepPlan(
            step_id=self.step_id,
            rows_epoch=decodes.epoch,
            released=np.array(released, dtype=np.int32) if released else NO_IDS,
            admitted=tuple(self.admitted),
            block_rows=self.block_rows,
            block_ids=self.block_ids,
            copies=np.array(self.copies, dtype=np.int32) if self.copies else NO_PAIRS,
            state_copies=np.array(self.state_copies, dtype=np.int32) if self.state_copies else NO_PAIRS,
            decode_rows=decodes.rows,
            prefill_rows=prefill_rows,
            prefill_tokens=prefill_tokens,
            prefill_samples=samples,
            extensions=self.extensions,
        )

    def _take_snapshots(self, state: SchedulerState) -> None:
        """The states of these rows, as they are before this step, are kept."""
        assert state.blocks.snapshots is not None
        source_of: dict[int, int] = {}  # a slot may be taken twice, if there are few
        for name, row in self.snapshots:
            slot = state.blocks.snapshots.take(name)
            if slot is not None:
                source_of[slot] = row
        self.state_copies += [(row, slot) for slot, row in source_of.items()]

    def _advance_prefills(self, rows: RunningBatch) -> tuple[IntArray, IntArray, BoolArray]:
        """The plan's ``prefill_rows``, ``prefill_tokens`` and ``prefill_samples``."""
        if not self.prefills:
            return NO_IDS, NO_IDS, NO_FLAGS
        prefilled = np.array([sequence.row for sequence, _ in self.prefills])
        num_tokens = np.array([count for _, count in self.prefills])
        rows.num_scheduled[prefilled] += num_tokens
        samples: BoolArray = rows.num_tokens[prefilled] == rows.num_scheduled[prefilled]
        if samples.any():
            rows.start_decoding(prefilled[samples])
        return prefilled.astype(np.int32), num_tokens.astype(np.int32), samples


class StepScheduler:
    """Serves the running rows in order, and preempts from the other end when blocks run out.

    Progress: the first of all running sequences is never preempted, because it alone always fits into the pool; every
    other gives way to it.  So the first one finishes, and by induction all do.  That it fits has two reasons.  No
    sequence is let in whose tokens need more blocks than the pool has, if those before windows are given back before
    new ones are allocated (``SchedulerLimits.capacity_tokens``).  And a chunk of a prompt is never longer than what
    fits alone, which is at least up to the end of a block (``BlockManager.chunk_limit``).
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._rows = state.rows
        self._blocks = state.blocks

    def schedule_decodes(self, builder: StepPlanBuilder) -> None:
        """Schedule one token for each row in DECODE, as far as the budget goes."""
        chosen = self._ready_rows(builder)
        if builder.stalled:
            return
        if len(chosen.rows) > builder.budget:
            first = sorted(chosen.sequences, key=lambda sequence: sequence.key)[: builder.budget]
            chosen = self._rows.row_set(np.array(sorted(sequence.row for sequence in first), dtype=np.int32))
        if len(chosen.rows) == 0:
            return
        crossing = self._rows.at_block_end(chosen)
        if len(crossing):
            chosen = self._give_blocks(builder, chosen, crossing)
        builder.decodes = chosen
        builder.budget -= len(chosen.rows)

    def schedule_prefills(self, builder: StepPlanBuilder) -> None:
        """Schedule the next chunk of each row in PREFILL, first in order first, as far as budget and blocks go.

        A part is kept for a request of another client that may enter: it does not wait for all chunks of a long prompt.
        """
        prefilling = self._rows.prefilling()
        first = self._state.waiting.peek() if prefilling and self._rows.num_vacant else None
        client = None if first is None else first.group.request.client
        for sequence in prefilling:
            kept = builder.budget // _KEPT if client not in (None, sequence.group.request.client) else 0
            if builder.budget == 0:
                break
            if sequence.phase is not SequencePhase.PREFILL:
                continue
            self.schedule_chunk(builder, sequence, builder.budget - kept)
        if builder.short:
            builder.drop_preempted(self._rows)

    def schedule_chunk(self, builder: StepPlanBuilder, sequence: Sequence, longest: int) -> None:
        """Schedule the next tokens of a row in PREFILL, at most ``longest``, if there are blocks for them."""
        start = int(self._rows.num_scheduled[sequence.row])
        longest = min(longest, self._blocks.next_chunk_limit(sequence.row))
        end = min(int(self._rows.num_tokens[sequence.row]), start + longest)
        chunk = self._state.chunk_end(sequence, start, end) - start
        if chunk and self._grow(builder, sequence, start + chunk):
            if start in sequence.snapshots_at and not is_lost(sequence.place):
                name = identity(sequence.place)
                assert isinstance(name, int), "a snapshot is behind a block"
                builder.snapshots.append((name, sequence.row))
            builder.add_prefill(sequence, chunk)
            self._blocks.publish([(sequence, start + chunk)])

    def _ready_rows(self, builder: StepPlanBuilder) -> RowSet:
        """The rows in DECODE, without those whose grammar must see a token first that a step in flight computes
        (``Blocked.TOKEN``), and those whose mask is not there.  If the former are as many as are left, the step waits
        for that token: running the others alone would cost more.  It never waits for a mask."""
        chosen, decoding = self._rows.ready_decodes(), self._rows.decoding()
        if len(chosen.rows) < len(decoding.rows):
            builder.stalled = self._rows.readiness.num_with(decoding.rows, Blocked.TOKEN) >= max(1, len(chosen.rows))
        return chosen

    def _give_blocks(self, builder: StepPlanBuilder, chosen: RowSet, crossing: IntArray) -> RowSet:
        """A logical block for each of ``crossing``; ``chosen`` without the rows that were preempted for it, none if the
        step must wait."""
        self._blocks.expire(crossing, self._rows.num_scheduled[crossing])
        while not self._blocks.has_room(len(crossing) * self._blocks.num_groups):
            if not builder.may_preempt:
                builder.stalled = True
                return NO_ROWS
            self._state.preempt(self._state.victim())
            builder.short = True
            chosen = self._rows.row_set(chosen.rows[self._rows.phase[chosen.rows] == SequencePhase.DECODE])
            crossing = self._rows.at_block_end(chosen)
        if len(crossing):
            builder.add_blocks(crossing, self._blocks.grow_rows(crossing))
        return chosen

    def _grow(self, builder: StepPlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens; False if the row has to wait for those before it in order."""
        row = sequence.row
        count = self._blocks.blocks_for(num_tokens) - int(self._rows.num_blocks[row])
        while not self._blocks.has_room(count * self._blocks.num_groups):
            builder.short = True
            if not builder.may_preempt:
                return False
            victim = self._state.victim()
            if victim is sequence:
                return False
            self._state.preempt(victim)
        if count > 0:
            builder.add_blocks(np.full(count, row, dtype=np.int32), self._blocks.grow(row, count))
        return True
