"""How one step is put together from the running batch: decodes first, then the next chunks of prompts.

::

    Scheduler.schedule
        |
    StepBuilder   schedule_decodes, schedule_prefills ----> StepDraft ----> StepPlan
    Admitter      admit ------------------------------------^   |
        |                                                       | advance: what was decided counts as scheduled
    Batch         rows, blocks, queue <-------------------------+

Rows that enter in this step are the business of ``Admitter`` (``admission``).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from tp_engine.log import get_logger
from tp_engine.plan import NO_FLAGS, NO_IDS, NO_MASKS, NO_PAIRS, Admission, BoolArray, IntArray, StepPlan
from tp_engine.sched.adapters import AdapterSlots
from tp_engine.sched.blocks.block_manager import BlockManager
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import identity, is_lost
from tp_engine.sched.constraint import FillMasks
from tp_engine.sched.decode_run import RowSet
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.row_state import NO_ROWS, RowState
from tp_engine.sched.sequence import Entry, Sequence, SequencePhase
from tp_engine.sched.tiers.disk_tier import NO_LINKS, TierLinks
from tp_engine.sched.tiers.host_tier import HostTier
from tp_engine.sched.waiting_queue import WaitingQueue

_logger = get_logger(__name__)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.  Prefix queries and hits are tokens of requests at their first admission, host and disk
    hits those of them that the host tier had, or the disk;
    recomputed tokens are those that a preempted sequence had, and did not find cached when it resumed."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_disk_hit_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


class Batch:
    """Rows, blocks and the queue, and the moves of a sequence between them.

    ``released`` are the rows left since the last plan, in order of leaving.  ``num_parked`` sequences have no row, are
    not in the queue, and have a bit of ``Blocked``.
    """

    def __init__(self, limits: SchedulerLimits, links: TierLinks = NO_LINKS) -> None:
        self.limits = limits
        self.rows = RowState(limits)
        self.blocks = BlockManager(limits, self.rows, links)
        self.waiting = WaitingQueue()
        self.adapters = AdapterSlots(limits.max_loras) if limits.max_loras else None
        self.counters = SchedulerCounters()
        self.released: list[int] = []
        self.num_parked = 0

    def enter(self, entries: list[Entry], step_id: int) -> list[IntArray]:
        """Seat sequences, with the blocks that they share and new ones; their tables."""
        self.rows.occupy(entries, step_id)
        for entry in entries:
            sequence = entry.sequence
            sequence.num_published, sequence.place = entry.num_published, entry.place
            sequence.group.running.append(sequence)
        return self.blocks.seat(entries)

    def leave(self, sequence: Sequence, phase: SequencePhase) -> None:
        """The sequence gives back row and blocks; its full blocks stay cached until their room is needed.

        So does its last block, if partly filled, of a request that others will continue.
        """
        self.blocks.publish([(sequence, int(self.rows.num_computed[sequence.row]))])
        if sequence.group.request.will_continue:
            self.blocks.publish_tail(sequence)
        self.blocks.release(sequence)
        self.released.append(sequence.row)
        if self.adapters is not None:
            self.adapters.leave(sequence.adapter)
        self.rows.vacate(sequence, phase)
        sequence.group.running.remove(sequence)

    def chunk_end(self, sequence: Sequence, start: int, end: int) -> int:
        """Where a chunk from token ``start`` on ends that could go to ``end``.

        A recurrent state can not be taken back.  So a chunk ends before the last token of a prompt whose siblings wait:
        with the state there they compute that token themselves.  It also ends where a snapshot is taken.
        """
        if not self.limits.has_states:
            return end
        stops = [position for position in sequence.snapshots_at if start < position < end]
        last = sequence.num_prompt_tokens - 1
        if sequence.can_fork and start < last < end and sequence.has_waiting_siblings:
            stops.append(last)
        return min(stops, default=end)

    def check_integrity(self) -> None:
        """Assert that each part agrees with itself."""
        self.rows.check_integrity(self.limits.block_size)
        self.blocks.check_integrity()
        self.waiting.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()

    def victim(self) -> Sequence:
        """The running sequence that is preempted next: of the lowest priority, the latest."""
        return max(self.rows.running(), key=lambda sequence: sequence.key)

    def preempt_all(self) -> None:
        """Put all running sequences back into the queue, those that waited longest in front."""
        for sequence in self.rows.running():
            self.preempt(sequence, "by an operator")

    def preempt(self, sequence: Sequence, why: str = "for want of KV blocks") -> None:
        """Put a running sequence back into the queue with its tokens; its K/V will be computed again."""
        num_lost = int(self.rows.num_computed[sequence.row])
        self.leave(sequence, SequencePhase.WAITING)
        sequence.num_lost_tokens += num_lost
        sequence.num_preemptions += 1
        sequence.prompt_logprobs.clear()
        self.counters.num_preemptions += 1
        self.waiting.push(sequence)
        _logger.info(
            "request %s, sequence %d: preempted %s; %d tokens to compute again unless still cached",
            sequence.request_id,
            sequence.index,
            why,
            num_lost,
            extra={"request_id": sequence.request_id},
        )


class StepDraft(msgspec.Struct):
    """A step plan in the making: what has been decided so far.  ``budget`` tokens may still be scheduled.

    ``may_preempt``: no step is in flight whose result could end a sequence and so free blocks.  ``short``: a running
    row lacked blocks, so no sequence may enter in this step.  ``stalled``: the step must wait for the results in
    flight.
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
    lane_rows: IntArray = NO_IDS
    lane_tokens: IntArray = NO_IDS

    def add_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """New logical blocks of rows (n,) that have been in the batch before; ``block_ids`` (n * G,)."""
        if len(self.block_rows):
            rows = np.concatenate((self.block_rows, rows))
            block_ids = np.concatenate((self.block_ids, block_ids))
        self.block_rows, self.block_ids = rows, block_ids

    def add_copies(self, sources: BlockIds, targets: IntArray) -> None:
        """Each target (G,) begins as its source; no copy is needed where the source itself was free and is the
        target."""
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self.copies += [(source, target) for source, target in pairs if source != target]

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next ``num_tokens`` of a sequence."""
        self.prefills.append((sequence, num_tokens))
        self.budget -= num_tokens

    def drop_preempted(self, rows: RowState) -> None:
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

    def advance(self, batch: Batch, fill_masks: FillMasks | None) -> StepPlan | None:
        """Count everything decided as scheduled and make the plan; None if there is nothing to run."""
        if self.is_empty:
            return None
        rows, decodes, released = batch.rows, self.decodes, batch.released
        batch.released = []
        if self.snapshots:
            self._take_snapshots(batch)
        if len(decodes.rows):
            rows.advance_decodes(decodes)
        prefill_rows, prefill_tokens, samples = self._advance_prefills(rows)
        mask_rows, masks = NO_IDS, NO_MASKS
        if rows.readiness.num_constrained:
            sampled: IntArray = np.concatenate((decodes.rows, prefill_rows[samples]))
            mask_rows, masks = _masks(sampled, rows, fill_masks)
        num_lanes = len(self.lane_rows)
        lanes = (np.arange(num_lanes) + batch.limits.max_num_seqs).astype(np.int32)
        plan = StepPlan(
            step_id=self.step_id,
            rows_epoch=0 if num_lanes else decodes.epoch,
            released=np.array(released, dtype=np.int32) if released else NO_IDS,
            admitted=tuple(self.admitted),
            block_rows=self.block_rows,
            block_ids=self.block_ids,
            copies=np.array(self.copies, dtype=np.int32) if self.copies else NO_PAIRS,
            state_copies=np.array(self.state_copies, dtype=np.int32) if self.state_copies else NO_PAIRS,
            decode_rows=np.concatenate((decodes.rows, lanes)) if num_lanes else decodes.rows,
            lane_rows=self.lane_rows,
            lane_tokens=self.lane_tokens,
            prefill_rows=prefill_rows,
            prefill_tokens=prefill_tokens,
            prefill_samples=samples,
            mask_rows=mask_rows,
            masks=masks,
        )
        return plan if batch.blocks.tier is None else batch.blocks.tier.finish(plan)

    def _take_snapshots(self, batch: Batch) -> None:
        """The states of these rows, as they are before this step, are kept."""
        assert batch.blocks.snapshots is not None
        source_of: dict[int, int] = {}  # a slot may be taken twice, if there are few
        for name, row in self.snapshots:
            slot = batch.blocks.snapshots.take(name)
            if slot is not None:
                source_of[slot] = row
        self.state_copies += [(row, slot) for slot, row in source_of.items()]

    def _advance_prefills(self, rows: RowState) -> tuple[IntArray, IntArray, BoolArray]:
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


class StepBuilder:
    """Serves the running rows in order, and preempts from the other end when blocks run out.

    Progress: the first of all running sequences is never preempted, because it alone always fits into the pool; every
    other gives way to it.  So the first one finishes, and by induction all do.  That it fits has two reasons.  No
    sequence is let in whose tokens need more blocks than the pool has, if those behind windows are given back before
    new ones are allocated (``SchedulerLimits.capacity_tokens``).  And a chunk of a prompt is never longer than what
    fits alone, which is at least up to the end of a block (``BlockManager.chunk_limit``).
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = batch.rows
        self._blocks = batch.blocks

    def schedule_decodes(self, draft: StepDraft) -> None:
        """One token for each row in DECODE, as far as the budget goes."""
        chosen = self._ready_rows(draft)
        if draft.stalled:
            return
        if len(chosen.rows) > draft.budget:
            chosen = self._first_in_order(chosen, draft.budget)
        if len(chosen.rows) == 0:
            return
        crossing = self._rows.at_block_end(chosen)
        if len(crossing):
            chosen = self._give_blocks(draft, chosen, crossing)
        draft.decodes = chosen
        draft.budget -= len(chosen.rows)

    def schedule_prefills(self, draft: StepDraft) -> None:
        """The next chunk of each row in PREFILL, first in order first, as far as budget and blocks go."""
        for sequence in self._rows.prefilling():
            if draft.budget == 0:
                break
            if sequence.phase is not SequencePhase.PREFILL:
                continue
            self._schedule_chunk(draft, sequence, draft.budget)
        if draft.short:
            draft.drop_preempted(self._rows)

    def hurry(self, draft: StepDraft, tier: HostTier) -> None:
        """Nothing can run: the first of the rows that wait for loads computes in this very step, which waits for them.

        A row that enters in this step already has the blocks for it, and no row is preempted for it.
        """
        loading = self._rows.loading()
        if draft.admitted:
            entering = {admission.row for admission in draft.admitted}
            loading = [sequence for sequence in loading if sequence.row in entering]
        if not loading:
            return
        sequence, row = loading[0], loading[0].row
        tier.hurry(self._rows.held(row))
        self._rows.readiness.clear(row, Blocked.LOADING)
        room = int(self._rows.capacity[row] - self._rows.num_scheduled[row])
        self._schedule_chunk(draft, sequence, min(draft.budget, room) if draft.admitted else draft.budget)
        if draft.short:
            draft.drop_preempted(self._rows)

    def _schedule_chunk(self, draft: StepDraft, sequence: Sequence, longest: int) -> None:
        """The next tokens of a row in PREFILL, at most ``longest``, if there are blocks for them."""
        start = int(self._rows.num_scheduled[sequence.row])
        longest = min(longest, self._blocks.next_chunk_limit(sequence.row))
        end = min(int(self._rows.num_tokens[sequence.row]), start + longest)
        chunk = self._batch.chunk_end(sequence, start, end) - start
        if self._grow(draft, sequence, start + chunk):
            if start in sequence.snapshots_at and not is_lost(sequence.place):
                name = identity(sequence.place)
                assert isinstance(name, int), "a snapshot is behind a block"
                draft.snapshots.append((name, sequence.row))
            draft.add_prefill(sequence, chunk)
            self._blocks.publish([(sequence, start + chunk)])

    def _ready_rows(self, draft: StepDraft) -> RowSet:
        """The rows in DECODE, without those whose grammar must see a token first that a step in flight computes
        (``Blocked.TOKEN``, the only reason that a row in DECODE can have).

        If these are half of the rows or more, the step waits for that token: running the others alone would cost more.
        """
        chosen, num_decoding = self._rows.ready_decodes(), len(self._rows.decoding().rows)
        draft.stalled = 2 * len(chosen.rows) <= num_decoding > len(chosen.rows)
        return chosen

    def _first_in_order(self, chosen: RowSet, count: int) -> RowSet:
        first = sorted(chosen.sequences, key=lambda sequence: sequence.key)[:count]
        return self._rows.row_set(np.array(sorted(sequence.row for sequence in first), dtype=np.int32))

    def _give_blocks(self, draft: StepDraft, chosen: RowSet, crossing: IntArray) -> RowSet:
        """A logical block for each of ``crossing``; ``chosen`` without the rows that were preempted for it, none if the
        step must wait."""
        self._blocks.expire(crossing, self._rows.num_scheduled[crossing])
        while not self._blocks.has_room(len(crossing) * self._blocks.num_groups):
            if not draft.may_preempt:
                draft.stalled = True
                return NO_ROWS
            self._batch.preempt(self._batch.victim())
            draft.short = True
            chosen = self._rows.row_set(chosen.rows[self._rows.phase[chosen.rows] == SequencePhase.DECODE])
            crossing = self._rows.at_block_end(chosen)
        if len(crossing):
            draft.add_blocks(crossing, self._blocks.grow_rows(crossing))
        return chosen

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


def _masks(sampled: IntArray, rows: RowState, fill_masks: FillMasks | None) -> tuple[IntArray, IntArray]:
    """The plan's ``mask_rows`` and ``masks``: one for every constrained row of ``sampled`` (n,), which then awaits its
    token."""
    constrained: IntArray = sampled[rows.readiness.is_constrained[sampled]]
    if not len(constrained):
        return NO_IDS, NO_MASKS
    rows.readiness.block(constrained, Blocked.TOKEN)
    assert fill_masks is not None, "a request has a grammar, and the scheduler got no fill_masks"
    return constrained, fill_masks([sequence.constraint for sequence in rows.row_set(constrained).sequences])
