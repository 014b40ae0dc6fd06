"""Which waiting sequences enter the batch: hits, forks, and the reasons to wait."""

import enum
import time

from tp_engine.plan import Admission
from tp_engine.sched.blocks.block_manager import Donation, Hits
from tp_engine.sched.blocks.prefix_cache import BlockName, identity
from tp_engine.sched.blocks.snapshots import Snapshots
from tp_engine.sched.feature import SchedulerHooks
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import NO_ROW, Entry, Sequence, SequencePhase
from tp_engine.sched.step_scheduler import StepPlanBuilder

#: Candidates that may be passed over in one step.  It bounds the work of a step, however many wait for one prompt.
_MAX_DEFERRED = 32


class Verdict(enum.Enum):
    """What became of a candidate: it entered, or waits elsewhere; it lets others pass; no one after it may enter."""

    GONE = enum.auto()
    DEFERRED = enum.auto()
    NO_ROOM = enum.auto()


class Admitter:
    """Fills the rest of a step from the queue, in order; only sequences that wait for a sibling's prompt, or for a slot
    of their adapter, are passed.  It decides one sequence after the other, and gives rows and blocks to many at
    once."""

    def __init__(self, state: SchedulerState, hooks: SchedulerHooks) -> None:
        self._state = state
        self._rows = state.rows
        self._blocks = state.blocks
        self._hooks = hooks
        self._entries: list[Entry] = []  # of this step, not seated yet
        self._names: set[BlockName] = set()  # of what they will publish
        self._num_owed = 0  # blocks that they will take
        self._loading: dict[BlockName, Sequence] = {}  # what rows will publish that wait for their loads

    def admit(self, builder: StepPlanBuilder) -> None:
        """Admit while budget, rows and blocks last."""
        if builder.budget == 0 or not self._rows.num_vacant:
            return
        if not self._rows.readiness.num_blocked:
            self._loading.clear()
        self._blocks.expire_all()
        for begin in self._hooks.begin_admission:
            begin(builder.step_id)
        deferred: list[Sequence] = []
        while builder.budget > 0 and self._rows.num_vacant > len(self._entries) and len(deferred) < _MAX_DEFERRED:
            sequence = self._state.pop_waiting()
            if sequence is None:
                break
            verdict = self._consider(builder, sequence)
            if verdict is not Verdict.GONE:
                deferred.append(sequence)
            if verdict is Verdict.NO_ROOM:
                break
        self._seat(builder)
        for sequence in deferred:
            self._state.waiting.push(sequence)

    def _consider(self, builder: StepPlanBuilder, sequence: Sequence) -> Verdict:
        if not all(may_enter(sequence) for may_enter in self._hooks.may_enter):
            return Verdict.DEFERRED
        siblings = sequence.group.running
        if siblings and sequence.can_fork:
            donation = self._donation(sequence, siblings, builder.step_id)
            if donation is not None:
                return self._fork(builder, sequence, donation)
            if any(other.phase is SequencePhase.PREFILL for other in siblings):
                return Verdict.DEFERRED  # it will finish the prompt, or leave its row
        hits = self._blocks.find_hits(sequence)
        if hits.next_name in self._names:
            self._seat(builder)
            hits = self._blocks.find_hits(sequence)
        for review in self._hooks.review_hits:
            reviewed = review(sequence, hits)
            if reviewed is None:
                return Verdict.GONE
            hits = reviewed
        if self._loading and self._is_loading(hits.next_name):
            return Verdict.DEFERRED  # a row that waits for its loads will compute that block
        snapshots = self._blocks.snapshots
        if hits.parted is not None and snapshots is not None and snapshots.is_expected(hits.parted[0]):
            return Verdict.DEFERRED  # it can begin after more tokens soon
        return self._begin(builder, sequence, hits)

    def _begin(self, builder: StepPlanBuilder, sequence: Sequence, hits: Hits) -> Verdict:
        blocks, held, num_shared = self._blocks, hits.shared.held, len(hits.shared.table)
        chunk = min(builder.budget, blocks.chunk_limit(len(held), num_shared, hits.num_tokens))
        end = min(len(sequence.token_ids), hits.num_tokens + chunk)
        if blocks.snapshots is not None:
            self._plan_snapshots(blocks.snapshots, sequence, hits)
        end = self._state.chunk_end(sequence, hits.num_tokens, end)
        if end == hits.num_tokens:
            return Verdict.DEFERRED
        reach = len(sequence.token_ids) + 1 if sequence.num_preemptions else end
        num_needed = blocks.most_blocks(reach)
        if len(held):
            num_needed -= blocks.num_in_use(held)
        if not self._has_room(num_needed):
            return Verdict.NO_ROOM
        self._count_hits(sequence, hits)
        entry = Entry(sequence, hits.shared, hits.num_tokens, end, hits.tail, num_shared, hits.place)
        if blocks.snapshots is not None and num_shared:
            name = identity(hits.place)
            assert isinstance(name, int), "shared blocks end with one"
            entry.state_source = blocks.snapshots.use(name)
        self._enter(builder, entry)
        if hits.parted is not None and blocks.snapshots is not None:
            blocks.snapshots.expect(hits.parted[0], sequence, hits.parted[1])
        if hits.next_name is not None and end // blocks.block_size > num_shared:
            if entry.must_load:
                self._loading[hits.next_name] = sequence
            else:
                self._names.add(hits.next_name)
        if hits.tail is not None or entry.must_load:  # before its blocks are given to others; others look for its bit
            self._seat(builder)
        return Verdict.GONE

    def _plan_snapshots(self, snapshots: Snapshots, sequence: Sequence, hits: Hits) -> None:
        """Where the sequence will take snapshots: after the last block that an equal one could share, and where it
        parts from a known one."""
        last = (len(sequence.token_ids) - 1) // self._blocks.block_size * self._blocks.block_size
        parted = () if hits.parted is None else (hits.parted[1],)
        sequence.snapshots_at = tuple(position for position in {last, *parted} if position > hits.num_tokens)

    def _fork(self, builder: StepPlanBuilder, sequence: Sequence, donation: Donation) -> Verdict:
        """Share the donor's full blocks before the last prompt token; copy those that token falls into."""
        if not self._has_room(self._blocks.num_groups):
            return Verdict.NO_ROOM
        end = sequence.num_prompt_tokens
        if self._state.chunk_end(sequence, end - 1, end) < end:
            return Verdict.DEFERRED
        sequence.num_cached_tokens = sequence.group.sequences[0].num_cached_tokens
        shared, source = donation.shared, donation.source
        sequence.snapshots_at = ()
        entry = Entry(sequence, shared, end - 1, end, source, 0, sequence.group.cache_key)
        if self._state.limits.has_states:
            entry.state_source = donation.row
        self._enter(builder, entry)
        return Verdict.GONE

    def _enter(self, builder: StepPlanBuilder, entry: Entry) -> None:
        """The decision is made; siblings must see at once that one of them runs."""
        for on_enter in self._hooks.on_enter:
            on_enter(entry.sequence)
        if len(entry.shared.held):
            entry.shared, entry.must_load = self._blocks.hold(entry.shared)
        self._num_owed += (self._blocks.blocks_for(entry.end) - len(entry.shared.table)) * self._blocks.num_groups
        self._entries.append(entry)
        if not entry.must_load:
            builder.add_prefill(entry.sequence, entry.end - entry.num_computed)
        if entry.sequence.group.request.params.n > 1:
            self._seat(builder)

    def _seat(self, builder: StepPlanBuilder) -> None:
        """The sequences that have entered get their rows and blocks, and publish what they compute."""
        entries, self._entries, self._num_owed = self._entries, [], 0
        self._names.clear()
        if not entries:
            return
        tables = self._state.enter(entries, builder.step_id)
        now_s = time.monotonic()
        for entry, table in zip(entries, tables, strict=True):
            entry.sequence.first_scheduled_s = entry.sequence.first_scheduled_s or now_s
            if entry.source is not None:
                builder.add_copies(entry.source, table[len(entry.shared.table)])
            if entry.state_source is not None:
                builder.state_copies.append((entry.state_source, entry.sequence.row))
            sequence = entry.sequence
            builder.admitted.append(
                Admission(
                    row=sequence.row,
                    token_ids=sequence.ids_for_ranks,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_computed_tokens=entry.num_computed,
                    block_ids=table.reshape(-1),
                    sampling=sequence.sampling,
                )
            )
            if entry.must_load:
                self._rows.readiness.block(entry.sequence.row, Blocked.LOADING)
        self._blocks.publish((entry.sequence, entry.end) for entry in entries if not entry.must_load)

    def _is_loading(self, name: BlockName | None) -> bool:
        """Whether a row will compute the block of this name, and waits for its loads now."""
        leader = None if name is None else self._loading.get(name)
        if leader is None or name is None:
            return False
        if leader.row != NO_ROW and self._rows.readiness.has(leader.row, Blocked.LOADING):
            return True
        del self._loading[name]
        return False

    def _donation(self, sequence: Sequence, siblings: list[Sequence], step_id: int) -> Donation | None:
        """From a running sibling that still holds all that a fork needs, and has computed it or will have once the
        plans before this one ran.

        The source of a copy must be complete when the step begins.  A sibling that enters in this step may begin with
        blocks that are copied or computed in it.  A recurrent state must be that after just these tokens.
        """
        rows, num_tokens, has_states = self._rows, sequence.num_prompt_tokens - 1, self._state.limits.has_states
        for other in siblings:
            scheduled = int(rows.num_scheduled[other.row])
            if has_states and (scheduled != num_tokens or rows.since_step[other.row] >= step_id or not num_tokens):
                continue
            if scheduled >= num_tokens:
                found = self._blocks.donation(other.row, num_tokens)
                if found is not None and (found.source is None or rows.since_step[other.row] < step_id):
                    return found
        return None

    def _has_room(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` can be given away while the running rows still get those of their next step."""
        running = self._rows.num_running + len(self._entries)
        num_kept = self._num_owed + running // self._blocks.block_size * self._blocks.num_groups
        return num_blocks + num_kept <= self._blocks.pool.num_available or running == 0

    def _count_hits(self, sequence: Sequence, hits: Hits) -> None:
        counters, num_hit_tokens = self._state.counters, hits.num_tokens
        if sequence.num_preemptions:
            counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_hit_tokens)
            sequence.num_lost_tokens = 0
        else:
            counters.num_prefix_query_tokens += len(sequence.token_ids)
            counters.num_prefix_hit_tokens += num_hit_tokens
            sequence.num_cached_tokens = num_hit_tokens
            for on_hits in self._hooks.on_hits:
                on_hits(sequence, hits)
