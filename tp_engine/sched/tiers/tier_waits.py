"""Which sequences wait for the tiers: rows for loads from the host, and others for the disk, and for how long.

::

    waiting queue --considered, part of its prefix is on disk--> parked (Blocked.READING) --read--> waiting queue
                                                                    |
                                                                    +--after 30 s, or if the disk has stalled: what is
                                                                       not read is computed again

A parked sequence has no row and no block; its reads hold slots of the host tier, whatever becomes of it.  So others run
on, and nothing can wait for it in a circle.  A long prefix is read in several rounds.  While reads of others take all
room, it waits for those.  What has been read is on the host like any other block, and may be lost again before the
sequence enters.  So rounds after which no less is left to read are limited.
"""

from typing import NamedTuple, Protocol

from tp_engine.plan import StepPlan
from tp_engine.sched.blocks.block_manager import Hits
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder, StepScheduler
from tp_engine.sched.tiers.disk_tier import DiskTierManager
from tp_engine.sched.tiers.host_tier import HostTierManager

_MAX_ROUNDS = 3  # without progress
_PATIENCE_S = 30.0
_SHARE = 2  # what part of the host's slots one sequence may fill


class Reader(Protocol):
    """A sequence, or what will be one: see ``Sequence``."""

    num_disk_waits: int
    num_read_blocks: int


class _DiskWait(NamedTuple):
    sequence: Sequence
    number: int
    deadline_s: float


class DiskWaits(SchedulerFeature):
    """The parked sequences."""

    def __init__(self, state: SchedulerState, tier: HostTierManager, disk: DiskTierManager) -> None:
        self._state, self.tier, self._disk = state, tier, disk
        self._clock = disk.clock
        self._waits: list[_DiskWait] = []

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.cache_salt.append(self.cache_salt)
        hooks.poll.append(self.poll)
        hooks.review_hits.append(self.review_hits)

    @property
    def num_waiting(self) -> int:
        """Parked sequences, including those that have been aborted since."""
        return len(self._waits)

    @property
    def has_background_work(self) -> bool:
        """Whether anything is to be written, or being read or written by a disk that answers."""
        return self._disk.has_work or (self._disk.is_busy and not self._disk.reads.is_stalled)

    def finish_bare(self, bare: StepPlan) -> StepPlan:
        """Return a plan without rows with what the disk tier orders now; ``bare`` itself if that is nothing."""
        self.poll()
        plan = self.tier.finish(bare)
        if plan is bare:
            self._disk.rest()
        return plan

    def cache_salt(self, salt: str) -> str:
        return self._disk.salt(salt)

    def review_hits(self, sequence: Sequence, hits: Hits) -> Hits | None:
        """Park a sequence with hits on disk until a read has ended; it may go on without them."""
        if not sequence.reads_disk:
            return hits
        if self._must_wait(sequence, hits.shared.held):
            self._state.num_parked += 1
            return None
        return hits if sequence.reads_disk else self._state.blocks.find_hits(sequence)

    def _must_wait(self, sequence: Sequence, held: BlockIds) -> bool:
        """Whether the sequence is parked until a read has ended, which begins ``held``, its hits.  If not, it takes its
        hits from the tiers above alone (``Sequence.reads_disk``)."""
        disk = self._disk
        num_left = int(disk.is_far(held).sum())
        if not num_left:
            return False
        sequence.reads_disk = False
        if sequence.num_disk_waits >= _MAX_ROUNDS or disk.reads.is_stalled:
            return False
        wanted = self.tier.first_below(held, _SHARE)
        number = self._fetch(sequence, wanted)
        number = number if number > disk.reads.num_ended else disk.reads.num_ordered
        if number <= disk.reads.num_ended or not disk.is_far(wanted).any():
            return False
        sequence.reads_disk = True
        sequence.num_disk_waits += num_left >= sequence.num_unread_blocks
        sequence.num_unread_blocks = num_left
        sequence.blocked |= Blocked.READING
        self._waits.append(_DiskWait(sequence, number, self._clock() + _PATIENCE_S))
        return True

    def read_ahead(self, sequence: Reader, held: BlockIds) -> bool:
        """Begin what reads a waiting sequence will need; whether any part of ``held`` is not above the disk."""
        if not self._disk.is_far(held).any():
            return False
        if sequence.num_disk_waits < _MAX_ROUNDS and not self._disk.reads.is_stalled:
            self._fetch(sequence, self.tier.first_below(held, _SHARE))
        return True

    def _fetch(self, sequence: Reader, wanted: BlockIds) -> int:
        """Begin the reads of the first of ``wanted`` that are on disk; the number of the last one that is for them."""
        sequence.num_read_blocks = max(sequence.num_read_blocks, int(self._disk.is_far(wanted).sum()))
        return self._disk.fetch(wanted, self.tier.take_slots)

    def poll(self) -> None:
        """Take in what ranks have reported, and let sequences go on that need not wait any longer."""
        disk, now_s = self._disk, self._clock()
        disk.settle()
        left: list[_DiskWait] = []
        for wait in self._waits:
            has_ended = wait.number <= disk.reads.num_ended
            if not wait.sequence.blocked & Blocked.READING:
                continue  # aborted
            if not (has_ended or disk.reads.is_stalled or now_s > wait.deadline_s):
                left.append(wait)
                continue
            if not has_ended:
                wait.sequence.num_disk_waits = _MAX_ROUNDS
            self._state.unblock(wait.sequence, Blocked.READING)
        self._waits = left


class TierLoads(SchedulerFeature):
    """Ends the waits of rows in ``Blocked.LOADING``, and adds the moves of ``tier`` to each plan."""

    def __init__(self, state: SchedulerState, tier: HostTierManager, builder: StepScheduler) -> None:
        self._state, self._tier, self._builder = state, tier, builder
        self._rows = state.rows

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.begin_plan.append(self.begin_plan)
        hooks.extend_plan.append(self.extend_plan)
        hooks.must_send.append(self.must_send)
        hooks.finish_plan.append(self.finish_plan)
        hooks.stats.append(self.stats)

    def begin_plan(self, builder: StepPlanBuilder) -> None:
        """Let those rows run whose loads have all gone out; the plan in the making waits for these."""
        if not self._rows.readiness.num_blocked:
            return
        for sequence in self._rows.loading():
            held = self._rows.held(sequence.row)
            if not self._tier.must_load(held):
                self._tier.require(held)
                self._state.unblock(sequence, Blocked.LOADING)

    def extend_plan(self, builder: StepPlanBuilder) -> None:
        """Let the first row that waits for loads compute in this step, which waits for them, if nothing else can run.
        A row that enters in this step already has the blocks for it, and no row is preempted for it."""
        if not builder.is_empty:
            return
        loading = self._rows.loading()
        if builder.admitted:
            entering = {admission.row for admission in builder.admitted}
            loading = [sequence for sequence in loading if sequence.row in entering]
        if not loading:
            return
        sequence, row = loading[0], loading[0].row
        self._tier.load_now(self._rows.held(row))
        self._rows.readiness.clear(row, Blocked.LOADING)
        room = int(self._rows.capacity[row] - self._rows.num_scheduled[row])
        self._builder.schedule_chunk(
            builder, sequence, min(builder.budget, room) if builder.admitted else builder.budget
        )
        if builder.short:
            builder.drop_preempted(self._rows)

    def must_send(self) -> bool:
        """Order what the disk tier must order now."""
        return self._tier.disk is not None and self._tier.disk.must_send

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        return self._tier.finish(plan)

    def stats(self) -> dict[str, int]:
        return self._tier.stats()
