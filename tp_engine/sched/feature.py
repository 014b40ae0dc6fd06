"""What an optional part of the scheduler may do, and when.

::

    Scheduler.add         resolve -> the request's sequences are made and queued -> on_add
    Scheduler.schedule    poll -> must_wait -> wants_step -> begin_plan -> extend_plan -> must_send -> finish_plan
                          -> after_plan
    Admitter              begin_admission -> may_enter -> review_hits -> limit_chunk -> on_enter
    Scheduler.update      on_result -> the tokens are entered -> extend_output
    a sequence            on_leave (it gives back its row) -> on_end -> on_request_end

``features.py`` makes all features.  The scheduler calls only the hooks that a feature overrides, so a step
costs nothing for what is switched off.
"""

from collections.abc import Iterable
from typing import Any

from tp_engine.plan import StepPlan, StepResult
from tp_engine.request import EngineRequest, StepOutput
from tp_engine.sched.blocks.block_manager import Hits
from tp_engine.sched.sequence import RequestGroup, Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder


class SchedulerFeature:
    """The base of all features; each hook does nothing."""

    def resolve(self, request: EngineRequest) -> EngineRequest:
        """Return the request as the scheduler is to see it; ``RequestError`` if it can not be served."""
        return request

    def on_add(self, group: RequestGroup) -> None:
        """See a request whose sequences have just been queued, or wait for their grammar."""

    def announce(self, session: str, cache_key: str, step_id: int) -> None:
        """See that a client's session (``SamplingParams.prompt_cache_key``) will go on soon; its prefixes begin with
        ``cache_key``."""

    def cache_salt(self, salt: str) -> str:
        """Return what stands for a request's salt in the prefix cache."""
        return salt

    def poll(self) -> None:
        """Take in what happened since the last plan, before the next one is made."""

    def must_wait(self) -> bool:
        """Return whether the next plan must be made after the results of all steps in flight, of which there are
        some."""
        return False

    def wants_step(self) -> bool:
        """Return whether the next step has something for this feature; asked while no step is in flight."""
        return False

    def begin_plan(self, builder: StepPlanBuilder) -> None:
        """Change the running rows before a step that is not steady is put together."""

    def extend_plan(self, builder: StepPlanBuilder) -> None:
        """Add to a step that is not steady, behind decodes, prefills and admissions."""

    def must_send(self) -> bool:
        """Return whether a plan must go out although nothing is to run, while no step is in flight."""
        return False

    def finish_plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan with what this feature has for the ranks."""
        return plan

    def after_plan(self, step_id: int) -> None:
        """Prepare later steps, once the plan of ``step_id`` is made."""

    def begin_admission(self, step_id: int) -> None:
        """See that the sequences that may enter in this step come next, in order."""

    def may_enter(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may enter now; if not, it lets others pass."""
        return True

    def review_hits(self, sequence: Sequence, hits: Hits) -> Hits | None:
        """Return the hits with which a waiting sequence begins; None if it waits for better ones, out of the queue."""
        return hits

    def limit_chunk(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where the next chunk of a sequence, from token ``start`` on, ends that could go to ``end``; it may not
        be scheduled in this step after all.  ``start``: it waits."""
        return end

    def on_enter(self, sequence: Sequence) -> None:
        """See a sequence that gets a row in this step."""

    def on_leave(self, sequence: Sequence) -> None:
        """See a sequence that gives back its row."""

    def on_result(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Return a step's plan and result without what this feature had added to the step."""
        return plan, result

    def extend_output(self, output: StepOutput) -> Iterable[Sequence]:
        """Add this feature's tokens of the step to ``output``; return the sequences that end with them."""
        return ()

    def on_end(self, sequence: Sequence) -> None:
        """See a sequence that has ended for good, after it had a row."""

    def on_request_end(self, group: RequestGroup) -> None:
        """See a request whose last sequence has ended."""

    def on_new_weights(self) -> None:
        """See that the weights are others from now on: what is cached is not found any more."""

    def reset_mm_cache(self) -> None:
        """Forget what was computed of images; rows may be running."""

    def stats(self) -> dict[str, Any]:
        """Return fields of ``SchedulerStats``."""
        return {}

    def check_integrity(self) -> None:
        """Assert that the feature agrees with itself."""
