"""The scheduler's harness with host memory: a rank whose moves run when they like, within the rules of ``plan``.

A store or a load begins after the forward passes of the plans before its own, and may end at any time until a plan
waits for it.  ``Lag`` chooses when: at once, as late as possible, or at random.  Each slot carries the token, the chain
hash and the group of layers of every position, as a block does, so a move of wrong or half-made content, too early or
too late, shows as a row that lost its history.
"""

from __future__ import annotations

import enum
import random
from collections import deque

import numpy as np

from tests.unit.sched.scheduler_harness import FakeRow, FakeWorker, Simulation, changed, tiers_of
from tests.unit.sched.test_scheduler_grammar import MaskedWorker
from tp_engine.features.kv_events.scheduling import KVEventSink
from tp_engine.features.tiers.disk_tier import TierLinks
from tp_engine.features.tiers.feature import LOADS, STORES, WAIT_LOAD
from tp_engine.job.tier_progress import CHANNEL_WORDS, TierProgress, TierProgressReader
from tp_engine.plan import StepPlan, StepResult
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits


class Lag(enum.Enum):
    """When moves happen."""

    NONE = "at once"
    MOST = "when a plan waits"
    RANDOM = "at random"


class TierWorker(FakeWorker):
    """A rank with a host tier."""

    def __init__(self, given: SchedulerLimits, lag: Lag) -> None:
        super().__init__(given)
        num_slots = (given.num_blocks + tiers_of(given).num_host_slots) * given.block_size
        self.num_loads = self.num_stores = self.num_waits = 0
        self._lag = lag
        self._random = random.Random(1)
        self._moves: deque[tuple[int, int, int]] = deque()  # batch, source, target; slots from ``num_blocks`` on
        self._batch = 0
        self._memory = [np.full(num_slots, -1, dtype=np.int64) for _ in range(3)]
        end = given.num_blocks * given.block_size
        self.kv_token, self.kv_chain, self.kv_group = (memory[:end] for memory in self._memory)
        self._ran: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self._ran.difference_update(plan.released.tolist())
        self._ran.update(plan.decode_rows.tolist(), plan.prefill_rows.tolist())
        return super().execute(plan)

    def _copy(self, plan: StepPlan) -> None:
        self._begin_moves(plan)
        if self._lag is Lag.NONE:
            self._end_moves(self._batch)
        elif self._lag is Lag.RANDOM:
            for _ in range(self._random.randint(0, len(self._moves))):
                self._end_first()
        assert 0 <= WAIT_LOAD.of(plan) <= self._batch, "a plan waits for a batch that never was"
        self._end_moves(WAIT_LOAD.of(plan))
        self.num_waits += WAIT_LOAD.of(plan) > 0
        super()._copy(plan)

    def _begin_moves(self, plan: StepPlan) -> None:
        given, first = self.limits, self.limits.num_blocks
        stores, loads = STORES.of(plan).tolist(), LOADS.of(plan).tolist()
        if not (stores or loads):
            return
        self._batch += 1
        self.num_stores, self.num_loads = self.num_stores + len(stores), self.num_loads + len(loads)
        blocks = [block for block, _ in stores] + [block for _, block in loads]
        slots = [slot for _, slot in stores] + [slot for slot, _ in loads]
        assert all(0 <= block < first for block in blocks) and all(
            0 <= slot < tiers_of(given).num_host_slots for slot in slots
        )
        assert len({slot for _, slot in stores}) == len(stores), "a slot is the target of two stores"
        assert len({block for _, block in loads}) == len(loads), "a block is the target of two loads"
        self._moves += [(self._batch, block, first + slot) for block, slot in stores]
        self._moves += [(self._batch, first + slot, block) for slot, block in loads]

    def _end_moves(self, batch: int) -> None:
        while self._moves and self._moves[0][0] <= batch:
            self._end_first()

    def _end_first(self) -> None:
        self._move(*self._moves.popleft()[1:])

    def _move(self, source: int, target: int) -> None:
        for memory in self._memory:
            blocks = memory.reshape(-1, self.limits.block_size)
            blocks[target] = blocks[source]

    def _check_history(self, row: FakeRow, start: int) -> None:
        """A row that has computed nothing yet may still wait for its loads."""
        if any(self.rows[number] is row for number in self._ran):
            super()._check_history(row, start)


class MaskedTierWorker(TierWorker, MaskedWorker):
    """A rank with a host tier that samples under masks."""


class RefusingWorker(TierWorker):
    """Two ranks that refuse one store in ``one_in`` each, by ``refuses``, and report late: a slot has nothing then."""

    def __init__(self, given: SchedulerLimits, lag: Lag, one_in: int) -> None:
        super().__init__(given, lag)
        words = [memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q") for _ in range(2)]
        self._ranks = [TierProgress(one) for one in words]
        self.poll = TierProgressReader(words).poll
        self._one_in = one_in
        self._ended = 0
        self._failed: list[int] = []
        self.num_refused = 0

    def _end_first(self) -> None:
        _, source, target = self._moves[0]
        super()._end_first()
        if target < self.limits.num_blocks:
            return
        self._ended += 1
        if self._random.randrange(self._one_in) == 0:
            self._failed.append(self._ended)
            self.num_refused += 1
            for memory in self._memory:
                memory.reshape(-1, self.limits.block_size)[target] = -1
        assert source < self.limits.num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Now and then a rank reports what has ended; each failure is one rank's."""
        for number, rank in enumerate(self._ranks):
            if self._random.random() < 0.6:
                first, count = rank.num_ended + 1, self._ended - rank.num_ended
                rank.end(count, [one for one in self._failed if one >= first and one % 2 == number])
        return super().execute(plan)


class TierSimulation(Simulation):
    """A scheduler with a host tier and its rank."""

    def __init__(
        self,
        given: SchedulerLimits,
        *,
        ahead: int = 0,
        lag: Lag = Lag.MOST,
        checks: bool = True,
        kv_events: KVEventSink | None = None,
    ) -> None:
        super().__init__(given, ahead=ahead, checks=checks, kv_events=kv_events)
        self.tier_worker = TierWorker(given, lag)
        self.worker = self.tier_worker


class RefusingSimulation(TierSimulation):
    """A scheduler with a host tier whose stores ranks may refuse, and its rank."""

    def __init__(
        self, given: SchedulerLimits, *, ahead: int, lag: Lag, one_in: int, kv_events: KVEventSink | None = None
    ) -> None:
        super().__init__(given, ahead=ahead, lag=lag)
        self.limits = given = changed(given, checks_stores=True)
        self.refusing = self.worker = self.tier_worker = RefusingWorker(given, lag, one_in)
        self.scheduler = Scheduler(
            given, given={"tiers": TierLinks({"stores": self.refusing.poll}), "kv_events": kv_events}
        )
