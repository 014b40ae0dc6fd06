"""The scheduler's harness with a disk: reads and writes that end when they like, fail, or never end; and restarts.

A read or write begins when the moves of its plan have ended, and ends in the order of its kind, at any later time.
Slots on disk carry the token, the chain hash and the group of every position, as blocks do.  The journal is a string of
bytes; a restart begins with what it has, and with the serials that the writes have left.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from tests.unit.features.tiers.host_tier_harness import Lag, TierSimulation, TierWorker
from tests.unit.sched.scheduler_harness import tiers_of
from tp_engine.features.kv_events.scheduling import KVEventSink
from tp_engine.features.tiers.disk_journal import DiskContents, JournalHeader, read_header, read_nodes
from tp_engine.features.tiers.disk_tier import TierLinks
from tp_engine.features.tiers.feature import DISK_READS, DISK_WRITES
from tp_engine.features.tiers.tier_waits import DiskWaits
from tp_engine.job.tier_progress import CHANNEL_WORDS, TIER_CHANNELS, TierProgress, TierProgressReader
from tp_engine.plan import NO_IDS, StepPlan, StepResult
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits


class Journal:
    """The journal in memory."""

    def __init__(self) -> None:
        self.data = b""
        self.num_rewrites = 0

    def append(self, records: bytes) -> None:
        """See ``JournalSink``."""
        self.data += records

    def rewrite(self, data: bytes) -> None:
        """See ``JournalSink``."""
        self.data, self.num_rewrites = data, self.num_rewrites + 1


class Disk:
    """What outlives a process: the journal, and the content and serial of each slot."""

    def __init__(self, given: SchedulerLimits) -> None:
        self.journal = Journal()
        self.serials = np.zeros(tiers_of(given).num_disk_slots, dtype=np.int64)
        self.memory = [
            np.full((tiers_of(given).num_disk_slots, given.block_size), -1, dtype=np.int64) for _ in range(3)
        ]

    def contents(self, given: SchedulerLimits, clock: object) -> DiskContents:
        """What a start finds."""
        header = read_header(self.journal.data)
        nodes = {} if header is None else read_nodes(self.journal.data, header, [self.serials])
        if header is None:
            header = JournalHeader(4 * given.block_size, given.num_groups, bytes(16), bytes(32))
        return DiskContents(header, nodes, int(self.serials.max()) + 1, self.journal, clock)  # type: ignore[arg-type]


class DiskWorker(TierWorker):
    """A rank with a disk.  ``pace`` is the probability that an operation ends when it is asked; ``fails`` that it
    fails; ``is_stalled`` disks end nothing."""

    def __init__(self, given: SchedulerLimits, lag: Lag, disk: Disk, pace: float, fails: float) -> None:
        super().__init__(given, lag)
        self.disk = disk
        self.pace, self.fails, self.is_stalled = pace, fails, False
        self.num_reads = self.num_writes = 0
        self._draws = random.Random(7)
        self._reads: deque[tuple[int, int, int]] = deque()  # batch of moves, source, target
        self._writes: deque[tuple[int, int, int]] = deque()
        self._next_serial = int(disk.serials.max()) + 1
        self._words = {name: memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q") for name in TIER_CHANNELS}
        self.readers = {name: TierProgressReader([words]).poll for name, words in self._words.items()}
        self._progress = {name: TierProgress(words) for name, words in self._words.items()}

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.num_tokens:
            result = super().execute(plan)
        else:  # moves, reads and writes alone
            assert plan.step_id == self.last_step_id + 1 and not len(plan.released) and not plan.admitted
            self.last_step_id = plan.step_id
            self._copy(plan)
            result = StepResult(step_id=plan.step_id, token_ids=NO_IDS)
        self.work()
        return result

    def _begin_moves(self, plan: StepPlan) -> None:
        super()._begin_moves(plan)
        self._reads += [(self._batch, source, target) for source, target in DISK_READS.of(plan).tolist()]
        self._writes += [(self._batch, source, target) for source, target in DISK_WRITES.of(plan).tolist()]
        self.num_reads, self.num_writes = (
            self.num_reads + len(DISK_READS.of(plan)),
            self.num_writes + len(DISK_WRITES.of(plan)),
        )

    def work(self) -> None:
        """Let some operations end."""
        while self._reads and not self.is_stalled and self._draws.random() < self.pace:
            batch, slot, host = self._reads.popleft()
            self._end("disk_reads", self._draws.random() < self.fails or not self._read(batch, slot, host))
        while self._writes and not self.is_stalled and self._draws.random() < self.pace:
            batch, host, slot = self._writes.popleft()
            serial, self._next_serial = self._next_serial, self._next_serial + 1
            has_failed = self._draws.random() < self.fails
            self._write(batch, host, slot, 0 if has_failed else serial)
            self._end("disk_writes", has_failed)

    def _end(self, channel: str, has_failed: bool) -> None:
        progress = self._progress[channel]
        progress.end(1, (progress.num_ended + 1,) if has_failed else ())

    def _read(self, batch: int, slot: int, host: int) -> bool:
        self._end_moves(batch)
        for memory, on_disk in zip(self._memory, self.disk.memory, strict=True):
            memory.reshape(-1, self.limits.block_size)[self.limits.num_blocks + host] = on_disk[slot]
        return bool(self.disk.serials[slot])

    def _write(self, batch: int, host: int, slot: int, serial: int) -> None:
        self._end_moves(batch)
        for memory, on_disk in zip(self._memory, self.disk.memory, strict=True):
            on_disk[slot] = memory.reshape(-1, self.limits.block_size)[self.limits.num_blocks + host]
        self.disk.serials[slot] = serial


class DiskSimulation(TierSimulation):
    """A scheduler with a disk tier and its rank; ``now_s`` is the time that it sees."""

    def __init__(
        self,
        given: SchedulerLimits,
        *,
        disk: Disk | None = None,
        ahead: int = 0,
        lag: Lag = Lag.MOST,
        checks: bool = True,
        pace: float = 0.7,
        fails: float = 0.0,
        kv_events: KVEventSink | None = None,
    ) -> None:
        super().__init__(given, ahead=ahead, lag=lag, checks=checks)
        self.disk = disk or Disk(given)
        self.now_s = 0.0
        self.disk_worker = DiskWorker(given, lag, self.disk, pace, fails)
        self.worker = self.tier_worker = self.disk_worker
        contents = self.disk.contents(given, lambda: self.now_s)
        self.scheduler = Scheduler(
            given, given={"tiers": TierLinks(self.disk_worker.readers, contents), "kv_events": kv_events}
        )
        waits = self.scheduler.feature(DiskWaits)
        assert waits is not None
        self.waits = waits

    def step(self, between: object = None) -> StepPlan | None:
        """As without a disk; where all wait for it, time passes."""
        for _ in range(10_000):
            while len(self.in_flight) <= self.ahead and (made := self.scheduler.schedule()) is not None:
                self.plans.append(made)
                self.in_flight.append(made)
                self._check()
            if self.in_flight or not self.scheduler.has_unfinished:
                return super().step(between)  # type: ignore[arg-type]
            assert self.waits.num_waiting, "unfinished work must have something to run, or to wait for"
            self.now_s += 0.1
            self.disk_worker.work()
        raise AssertionError("a wait for the disk has no end")

    def flush(self, max_plans: int = 10_000) -> None:
        """What an engine does when it is idle, and before it stops."""
        for _ in range(max_plans):
            if not self.waits.has_background_work:
                return
            plan = self.scheduler.schedule_bare(self.waits.finish_bare)
            self.now_s += 0.01
            if plan is None:
                self.disk_worker.work()
            else:
                self.plans.append(plan)
                self.scheduler.update(plan, self.worker.execute(plan))
            self._check()
        raise AssertionError("what is cached is not written")

    def restart(self, kv_events: KVEventSink | None = None) -> DiskSimulation:
        """Another process on this disk, after this one was killed."""
        return DiskSimulation(
            self.limits, disk=self.disk, ahead=self.ahead, pace=self.disk_worker.pace, kv_events=kv_events
        )
