"""Rows that wait for loads from the host tier: when they run, and what plans carry for the tiers."""

from tp_engine.plan import StepPlan
from tp_engine.sched.feature import SchedulerFeature
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.step_scheduler import StepPlanBuilder, StepScheduler
from tp_engine.sched.tiers.host_tier import HostTierManager


class TierLoads(SchedulerFeature):
    """Ends the waits of rows in ``Blocked.LOADING``, and adds the moves of ``tier`` to each plan."""

    def __init__(self, state: SchedulerState, tier: HostTierManager, builder: StepScheduler) -> None:
        self._state, self._tier, self._builder = state, tier, builder
        self._rows = state.rows

    def begin_plan(self, builder: StepPlanBuilder) -> None:
        """Let rows run all of whose loads have gone out; the plan in the making waits for these."""
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
        """Do as ``SchedulerFeature``: what the disk tier must order now."""
        return self._tier.disk is not None and self._tier.disk.must_send

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        return self._tier.finish(plan)

    def stats(self) -> dict[str, int]:
        return self._tier.stats()
