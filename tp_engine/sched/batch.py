"""The running batch: who enters and leaves it, and who gives way when blocks run out."""

from __future__ import annotations

from tp_engine.log import get_logger
from tp_engine.plan import IntArray
from tp_engine.sched.block_manager import BlockManager
from tp_engine.sched.entry import Entry
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.row_state import RowState
from tp_engine.sched.sequence import Sequence, SequencePhase
from tp_engine.sched.stats import SchedulerCounters
from tp_engine.sched.waiting_queue import WaitingQueue

_logger = get_logger(__name__)


class Batch:
    """Rows, blocks and the queue, and the moves of a sequence between them.

    ``released`` are the rows left since the last plan, in order of leaving.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.rows = RowState(limits)
        self.blocks = BlockManager(limits, self.rows)
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        self.released: list[int] = []

    def enter(self, entries: list[Entry], step_id: int) -> list[IntArray]:
        """Seat sequences, with the blocks that they share and new ones; their tables."""
        self.rows.occupy(entries, step_id)
        for entry in entries:
            sequence = entry.sequence
            sequence.num_published, sequence.place = entry.num_published, entry.place
            sequence.group.running.append(sequence)
        return self.blocks.seat(entries)

    def leave(self, sequence: Sequence, phase: SequencePhase) -> None:
        """The sequence gives back row and blocks; its full blocks stay cached while nobody needs their room.

        So does its last one, if partly filled, of a request that others will continue.
        """
        self.blocks.publish([(sequence, int(self.rows.num_computed[sequence.row]))])
        if sequence.group.request.will_continue:
            self.blocks.publish_tail(sequence)
        self.blocks.release(sequence)
        self.released.append(sequence.row)
        self.rows.vacate(sequence, phase)
        sequence.group.running.remove(sequence)

    def victim(self) -> Sequence:
        """Who gives way next: of the lowest priority, the latest."""
        return max(self.rows.running(), key=lambda sequence: sequence.key)

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue with its tokens; its K/V will be computed again."""
        num_lost = int(self.rows.num_computed[sequence.row])
        self.leave(sequence, SequencePhase.WAITING)
        sequence.num_lost_tokens += num_lost
        sequence.num_preemptions += 1
        sequence.prompt_logprobs.clear()
        self.counters.num_preemptions += 1
        self.waiting.push(sequence)
        _logger.info(
            "request %s, sequence %d: preempted for want of KV blocks; %d tokens to compute again unless still cached",
            sequence.request_id,
            sequence.index,
            num_lost,
            extra={"request_id": sequence.request_id},
        )
