"""Which sequences wait for the disk tier, and for how long.

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

from typing import NamedTuple

from tp_engine.features.tiers.disk_tier import DiskTierManager
from tp_engine.features.tiers.feature import WAIT, TierWait
from tp_engine.features.tiers.host_tier import HostTierManager
from tp_engine.plan import StepPlan
from tp_engine.sched.blocks.block_manager import Hits
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence

_MAX_ROUNDS = 3  # without progress
_PATIENCE_S = 30.0
_SHARE = 2  # what part of the host's slots one sequence may fill


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
        wait = WAIT.of(sequence)
        if not wait.reads_disk:
            return hits
        if self._must_wait(sequence, wait, hits.shared.held):
            self._state.num_parked += 1
            return None
        return hits if wait.reads_disk else self._state.blocks.find_hits(sequence)

    def _must_wait(self, sequence: Sequence, wait: TierWait, held: BlockIds) -> bool:
        """Whether the sequence is parked until a read has ended, which begins ``held``, its hits.  If not, it takes its
        hits from the tiers above alone (``TierWait.reads_disk``)."""
        disk = self._disk
        num_left = int(disk.is_far(held).sum())
        if not num_left:
            return False
        wait.reads_disk = False
        if wait.num_disk_waits >= _MAX_ROUNDS or disk.reads.is_stalled:
            return False
        wanted = self.tier.first_below(held, _SHARE)
        number = self._fetch(wait, wanted)
        number = number if number > disk.reads.num_ended else disk.reads.num_ordered
        if number <= disk.reads.num_ended or not disk.is_far(wanted).any():
            return False
        wait.reads_disk = True
        wait.num_disk_waits += num_left >= wait.num_unread_blocks
        wait.num_unread_blocks = num_left
        sequence.blocked |= Blocked.READING
        self._waits.append(_DiskWait(sequence, number, self._clock() + _PATIENCE_S))
        return True

    def read_ahead(self, wait: TierWait, held: BlockIds) -> bool:
        """Begin the reads that ``held`` will need; return whether any part of it is not above the disk."""
        if not self._disk.is_far(held).any():
            return False
        if wait.num_disk_waits < _MAX_ROUNDS and not self._disk.reads.is_stalled:
            self._fetch(wait, self.tier.first_below(held, _SHARE))
        return True

    def _fetch(self, wait: TierWait, wanted: BlockIds) -> int:
        """Begin the reads of the first of ``wanted`` that are on disk; the number of the last one that is for them."""
        wait.num_read_blocks = max(wait.num_read_blocks, int(self._disk.is_far(wanted).sum()))
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
                WAIT.of(wait.sequence).num_disk_waits = _MAX_ROUNDS
            self._state.unblock(wait.sequence, Blocked.READING)
        self._waits = left
