"""Steps of rows that go on decoding while nobody enters, ends or leaves, as most steps of a busy engine do.

Such a step is an id, the rows as they were, and blocks for the few that need one.  What else it changes, counters and
tokens, nobody looks at before the run of such steps is over, so it is noted and entered later, for many steps at once.
"""

from __future__ import annotations

from tp_engine.plan import NO_IDS, StepPlan, StepResult
from tp_engine.request import StepOutput
from tp_engine.sched.batch import Batch
from tp_engine.sched.stop_check import StopChecker


class SteadySteps:
    """Both halves of a steady step; each gives None, having decided nothing, for a step that is of another kind.

    Windows give back blocks for the rows that grow.  Such a row has filled its last block, and what is noted of it is
    less than a block, so that its capacity is the position of its next token, and all that it gives back is entered.
    """

    def __init__(self, batch: Batch, stops: StopChecker) -> None:
        self._batch = batch
        self._rows = batch.rows
        self._blocks = batch.blocks
        self._stops = stops
        self._max_rows = batch.limits.max_num_batched_tokens
        self._num_groups = batch.limits.num_groups
        self._has_windows = batch.blocks.windows.has_windows

    def plan(self, step_id: int) -> StepPlan | None:
        """The next step, if nobody can enter or end in it, no prompt is computed, and no row has a grammar."""
        rows, run = self._rows, self._rows.run
        if (
            run is None
            or run.num_steps_left <= 1
            or rows.num_prefilling
            or rows.num_constrained
            or (self._batch.waiting and rows.num_vacant)
            or self._batch.released
            or not 0 < len(run.rows.rows) <= self._max_rows
        ):
            return None
        if run.is_full:
            rows.settle()
        growing, block_ids = run.growing(), NO_IDS
        if len(growing):
            if self._has_windows:
                self._blocks.expire(growing, rows.capacity[growing])
            count = len(growing) * self._num_groups
            if count > self._blocks.pool.num_available:
                return None
            block_ids = self._blocks.take(count)
        run.note_plan(growing, block_ids)
        return StepPlan(step_id=step_id, block_rows=growing, block_ids=block_ids, decode_rows=run.rows.rows)

    def take(self, plan: StepPlan, result: StepResult) -> StepOutput | None:
        """What the oldest step in flight added, if its rows are those that decode now and none of them may end."""
        run = self._rows.run
        if (
            run is None
            or plan.decode_rows is not run.rows.rows
            or len(plan.prefill_rows)
            or self._rows.num_constrained
            or result.logprobs is not None
            or self._stops.may_any_stop(result.token_ids)
        ):
            return None
        assert len(result.token_ids) == len(plan.decode_rows), "one token for each row"
        if run.is_full:
            self._rows.settle()
        run.note_result(result.token_ids)
        request_ids, indices = run.rows.names
        return StepOutput(request_ids=request_ids, indices=indices, token_ids=result.token_ids.tolist())
