"""Steps of rows that go on decoding while none enters, ends or leaves: most steps of a busy engine.

Such a step is an id, the same rows as before, and blocks for the few rows that need one.  The counters and tokens that
it changes are not read before the run of such steps is over, so they are noted, and entered for many steps at once.
"""

from tp_engine.plan import NO_IDS, StepPlan, StepResult
from tp_engine.requests.request import StepOutput
from tp_engine.sched.fair_rows import FairRows
from tp_engine.sched.outcome import StopChecker
from tp_engine.sched.scheduler_state import SchedulerState


class SteadySteps:
    """Both halves of a steady step; each returns None, and changes nothing, for a step of another kind."""

    def __init__(self, state: SchedulerState, stops: StopChecker, fair_rows: FairRows) -> None:
        self._state = state
        self._rows = state.rows
        self._readiness = state.rows.readiness
        self._blocks = state.blocks
        self._stops = stops
        self._fair_rows = fair_rows
        self._max_rows = state.limits.max_num_batched_tokens
        self._num_groups = state.limits.num_groups
        self._has_windows = state.blocks.windows.has_windows

    def schedule(self, step_id: int) -> StepPlan | None:
        """Return the next step, if no row can enter or end in it, no prompt is computed, and no row is blocked or has a
        grammar."""
        rows, run = self._rows, self._rows.run
        if (
            run is None
            or run.num_steps_left <= 1
            or rows.prefilling_rows
            or self._readiness.num_constrained
            or self._readiness.num_blocked
            or (self._state.waiting and (rows.num_vacant or self._fair_rows.are_due))
            or self._state.released
            or not 0 < len(run.rows.rows) <= self._max_rows
        ):
            return None
        growing, block_ids = run.growing(), NO_IDS
        if len(growing):
            if self._has_windows:
                self._blocks.expire(growing, rows.ends_of_full(growing))
            count = len(growing) * self._num_groups
            if count > self._blocks.pool.num_available:
                return None
            block_ids = self._blocks.allocate(count)
        run.note_plan(growing, block_ids)
        rows.note(run)
        chosen = run.rows
        return StepPlan(
            step_id=step_id, rows_epoch=chosen.epoch, block_rows=growing, block_ids=block_ids, decode_rows=chosen.rows
        )

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput | None:
        """Return what the oldest step in flight added, if its rows are those that decode now and none of them may
        end."""
        run = self._rows.run
        if (
            run is None
            or plan.rows_epoch != run.rows.epoch
            or len(plan.prefill_rows)
            or self._readiness.num_constrained
            or result.logprobs is not None
            or self._stops.may_any_stop(result.token_ids)
        ):
            return None
        assert len(result.token_ids) == len(plan.decode_rows), "one token for each row"
        run.note_result(result.token_ids)
        self._rows.note(run)
        request_ids, indices = run.rows.names
        return StepOutput(request_ids=request_ids, indices=indices, token_ids=result.token_ids.tolist())
