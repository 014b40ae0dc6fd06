"""The scheduler's half of the tiers: what is made, rows that wait for loads, and the moves of each plan."""

from collections.abc import Iterator

import numpy as np

from tp_engine.features.tiers.disk_tier import NO_LINKS
from tp_engine.features.tiers.feature import LIMITS, STATS, WAIT, TierStats
from tp_engine.features.tiers.host_tier import HostTierManager
from tp_engine.features.tiers.prefetch import Prefetcher
from tp_engine.features.tiers.tier_waits import DiskWaits
from tp_engine.plan import StepPlan
from tp_engine.sched.blocks.block_manager import Hits
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder, StepScheduler


def make(parts: SchedulerParts) -> Iterator[SchedulerFeature]:
    """Put the tiers below the pool, if there are any."""
    state, tiers = parts.state, LIMITS.get(parts.state.limits)
    if tiers is None or not tiers.num_host_slots or not state.limits.enable_prefix_caching:
        return
    tier = HostTierManager(state.limits, tiers, state.blocks, parts.given.get("tiers", NO_LINKS))
    state.blocks.tier = tier
    waits = None if tier.disk is None else DiskWaits(state, tier, tier.disk)
    if waits is not None:
        yield waits
    yield TierLoads(state, tier, parts.builder)
    yield Prefetcher(state, tier, waits)


class TierLoads(SchedulerFeature):
    """Ends the waits of rows in ``Blocked.LOADING``, adds the moves of ``tier`` to each plan, and counts."""

    def __init__(self, state: SchedulerState, tier: HostTierManager, builder: StepScheduler) -> None:
        self._state, self._tier, self._builder = state, tier, builder
        self._rows = state.rows
        self._num_host_hits = self._num_disk_hits = 0

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.begin_plan.append(self.begin_plan)
        hooks.extend_plan.append(self.extend_plan)
        hooks.must_send.append(self.must_send)
        hooks.finish_plan.append(self.finish_plan)
        hooks.on_hits.append(self.on_hits)
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

    def on_hits(self, sequence: Sequence, hits: Hits) -> None:
        """Count where the hits come from."""
        blocks, wait = self._state.blocks, WAIT.of(sequence)
        num_below = int(np.count_nonzero(self._tier.is_below(hits.shared.table).any(axis=1))) * blocks.block_size
        num_read = min(wait.num_read_blocks // blocks.num_groups * blocks.block_size, hits.num_tokens)
        self._num_disk_hits += num_read
        self._num_host_hits += max(0, min(num_below + wait.num_prefetched_tokens, hits.num_tokens) - num_read)

    def stats(self) -> dict[str, TierStats]:
        hits = {"num_host_hit_tokens": self._num_host_hits, "num_disk_hit_tokens": self._num_disk_hits}
        return {STATS.name: TierStats(**self._tier.stats(), **hits)}
