"""The scheduler's state: rows, blocks and the queue, and the moves of a sequence between them."""

from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.plan import IntArray
from tp_engine.sched.blocks.block_manager import BlockManager
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.sequence import NO_ROW, Entry, Sequence, SequencePhase
from tp_engine.sched.waiting_queue import WaitingQueue
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.  Prefix queries and hits are tokens of requests at their first admission;
    recomputed tokens are those that a preempted sequence had, and did not find cached when it resumed.  Of the
    preemptions, those of sequences with two answer tokens or more are counted apart."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_preempted_answers: int = 0


class SchedulerState:
    """Rows, blocks and the queue, shared by all parts of the scheduler.  ``released`` are the rows left since the last
    plan, in order of leaving.  ``num_parked`` sequences have no row, are not in the queue, and have a bit of
    ``Blocked``.  ``num_unmade`` more will be made, when one of their request leaves the queue.  ``on_make``,
    ``on_leave`` and ``limit_chunk`` are hooks of the scheduler's features."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.rows = RunningBatch(limits)
        self.blocks = BlockManager(limits, self.rows)
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        self.released: list[int] = []
        self.num_parked = self.num_unmade = 0
        self.on_make: list[Callable[[Sequence], None]] = []
        self.on_leave: list[Callable[[Sequence], None]] = []
        self.limit_chunk: list[Callable[[Sequence, int, int], int]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, made or not."""
        return len(self.waiting) + self.num_parked + self.num_unmade

    def pop_waiting(self) -> Sequence | None:
        """Remove and return the next living sequence of the queue; None if there is none.  The one after it of its
        request takes its place, and is made if need be: keys rise within a request, so it was after it all along."""
        sequence = self.waiting.pop()
        if sequence is not None and (group := sequence.group).num_unmade and sequence is group.sequences[-1]:
            following = group.make_next()
            self.num_unmade -= 1
            for on_make in self.on_make:
                on_make(following)
            self.wait(following)
        return sequence

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence without a row into the queue; or beside it, as long as something holds it back."""
        if sequence.blocked:
            self.num_parked += 1
        else:
            self.waiting.push(sequence)

    def enter(self, entries: list[Entry], step_id: int) -> list[IntArray]:
        """Seat sequences, with the blocks that they share and new ones; returns their tables."""
        self.rows.occupy(entries, step_id)
        for entry in entries:
            sequence = entry.sequence
            sequence.num_published, sequence.place = entry.num_published, entry.place
            sequence.group.running.append(sequence)
            self.waiting.count_row(sequence, 1)
        return self.blocks.seat(entries)

    def leave(self, sequence: Sequence, phase: SequencePhase) -> None:
        """Take row and blocks back from the sequence; its full blocks stay cached until their room is needed.  So does
        its last block, if partly filled, of a request that others will continue."""
        self.blocks.publish([(sequence, int(self.rows.num_computed[sequence.row]))])
        if sequence.group.request.will_continue:
            self.blocks.publish_tail(sequence)
        self.blocks.release(sequence)
        self.released.append(sequence.row)
        for on_leave in self.on_leave:
            on_leave(sequence)
        self.rows.vacate(sequence, phase)
        sequence.group.running.remove(sequence)
        self.waiting.count_row(sequence, -1)

    def unblock(self, sequence: Sequence, reason: Blocked) -> None:
        """Clear ``reason``: the sequence may be scheduled, or enter the queue, if no other holds it back."""
        if sequence.row != NO_ROW:
            self.rows.readiness.clear(sequence.row, reason)
        elif sequence.phase is SequencePhase.WAITING and sequence.blocked:
            sequence.blocked &= ~reason
            if not sequence.blocked:
                self.num_parked -= 1
                self.waiting.push(sequence)

    def chunk_end(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where a chunk from token ``start`` on ends that could go to ``end``; ``start`` if the sequence has to
        wait.  A recurrent state cannot be taken back.  So a chunk ends before the last token of a prompt whose
        siblings wait: with the state there they compute that token themselves.  It also ends where a snapshot is
        taken."""
        if self.limits.has_states:
            stops = [position for position in sequence.snapshots_at if start < position < end]
            last = sequence.num_prompt_tokens - 1
            if sequence.can_fork and start < last < end and sequence.has_waiting_siblings:
                stops.append(last)
            end = min(stops, default=end)
        for limit_chunk in self.limit_chunk:
            end = limit_chunk(sequence, start, end)
        return end

    def check_integrity(self) -> None:
        """Assert that each part agrees with itself."""
        self.rows.check_integrity(self.limits.block_size)
        self.blocks.check_integrity()
        self.waiting.check_integrity()

    def victim(self) -> Sequence:
        """Return the running sequence that is preempted next: of the client with the most rows, the last in order."""
        num_rows = self.waiting.num_rows
        return max(self.rows.running(), key=lambda one: (num_rows(one.group.request.client), one.key))

    def preempt_all(self) -> None:
        """Put all running sequences back into the queue, those that waited longest in front."""
        for sequence in self.rows.running():
            self.preempt(sequence, "by an operator")

    def preempt(self, sequence: Sequence, why: str = "as the KV cache is full") -> None:
        """Put a running sequence back into the queue with its tokens; its K/V will be computed again."""
        num_lost = int(self.rows.num_computed[sequence.row])
        sequence.blocked = self.rows.readiness.kept(sequence.row)
        self.leave(sequence, SequencePhase.WAITING)
        sequence.num_lost_tokens += num_lost
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.counters.num_preempted_answers += int(len(sequence.token_ids) - sequence.num_prompt_tokens > 1)
        self.wait(sequence)
        _logger.info(
            "request %s, sequence %d: preempted %s; %d tokens to compute again unless still cached",
            sequence.request_id,
            sequence.index,
            why,
            num_lost,
            extra={"request_id": sequence.request_id},
        )
