"""What an optional part of the scheduler may do, and when.

::

    Scheduler.add         resolve -> the request's first sequence is made and queued -> on_add
    Scheduler.schedule    poll -> must_wait -> wants_step -> begin_plan -> extend_plan -> must_send -> finish_plan
                          -> after_plan
    Admitter              begin_admission -> on_make -> may_enter -> review_hits -> limit_chunk -> on_hits -> on_enter
    Scheduler.update      on_result -> on_prompts -> the tokens are entered -> on_tokens -> on_first
                          -> extend_output -> after_result
    a sequence            on_leave (it gives back its row) -> on_end -> on_request_end

The registry of features (``features/registry.py``) makes them all.  Each appends its functions to the hooks that it
needs, so a step costs nothing for what is switched off.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tp_engine.plan import IntArray, StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, SequenceDelta, StepOutput
from tp_engine.sched.blocks.block_manager import Hits
from tp_engine.sched.blocks.cache_keys import Variant
from tp_engine.sched.outcome import StepOutcome, StopChecker
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import RequestGroup, Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder, StepScheduler


@dataclass(slots=True)
class SchedulerHooks:
    """What the scheduler calls, by hook: the functions of all features that are on, in the features' order."""

    resolve: list[Callable[[EngineRequest], EngineRequest]] = field(default_factory=list)
    """The request as the scheduler is to see it; ``RequestError`` if it cannot be served."""

    on_add: list[Callable[[RequestGroup], None]] = field(default_factory=list)
    """A request's first sequence has just been queued, or waits for its grammar."""

    on_make: list[Callable[[Sequence], None]] = field(default_factory=list)
    """Another sequence of a request has been made, and is queued next, unless it is ``blocked``."""

    announce: list[Callable[[str, str, int], None]] = field(default_factory=list)
    """``session, cache_key, step_id``: a client's session (``SamplingParams.prompt_cache_key``) will go on soon; its
    prefixes begin with ``cache_key``."""

    cache_salt: list[Callable[[str], str]] = field(default_factory=list)
    """What stands for a request's salt in the prefix cache."""

    variant: list[Callable[[EngineRequest], Variant]] = field(default_factory=list)
    """Which variant of the model a request runs: its K/V are never taken for those of another."""

    poll: list[Callable[[], None]] = field(default_factory=list)
    """Takes in what happened since the last plan, before the next one is made."""

    must_wait: list[Callable[[], bool]] = field(default_factory=list)
    """Whether the next plan must be made after the results of all steps in flight, of which there are some."""

    wants_step: list[Callable[[], bool]] = field(default_factory=list)
    """Whether the next step has something for this feature; asked while no step is in flight."""

    begin_plan: list[Callable[[StepPlanBuilder], None]] = field(default_factory=list)
    """Changes the running rows before a step that is not steady is put together."""

    extend_plan: list[Callable[[StepPlanBuilder], None]] = field(default_factory=list)
    """Adds to a step that is not steady, after decodes, prefills and admissions."""

    must_send: list[Callable[[], bool]] = field(default_factory=list)
    """Whether a plan must go out although nothing is to run, while no step is in flight."""

    finish_plan: list[Callable[[StepPlan], StepPlan]] = field(default_factory=list)
    """The plan with what this feature has for the ranks."""

    after_plan: list[Callable[[int], None]] = field(default_factory=list)
    """``step_id``: prepares later steps, once this step's plan is made."""

    begin_admission: list[Callable[[int], None]] = field(default_factory=list)
    """``step_id``: the sequences that may enter in this step come next, in order."""

    may_enter: list[Callable[[Sequence], bool]] = field(default_factory=list)
    """Whether a waiting sequence may enter now; if not, it lets others pass."""

    review_hits: list[Callable[[Sequence, Hits], Hits | None]] = field(default_factory=list)
    """The hits with which a waiting sequence begins; None if it waits for better ones, out of the queue."""

    on_hits: list[Callable[[Sequence, Hits], None]] = field(default_factory=list)
    """A sequence begins with these hits, for the first time."""

    limit_chunk: list[Callable[[Sequence, int, int], int]] = field(default_factory=list)
    """``sequence, start, end``: where the next chunk, from token ``start`` on, ends that could go to ``end``; it may
    not be scheduled in this step after all.  ``start``: it waits."""

    on_enter: list[Callable[[Sequence], None]] = field(default_factory=list)
    """A sequence gets a row in this step."""

    on_leave: list[Callable[[Sequence], None]] = field(default_factory=list)
    """A sequence gives back its row."""

    on_result: list[Callable[[StepPlan, StepResult], tuple[StepPlan, StepResult]]] = field(default_factory=list)
    """A step's plan and result without what this feature had added to the step."""

    on_prompts: list[Callable[[StepResult, IntArray], None]] = field(default_factory=list)
    """``result, rows``: chunks of the prompts of these rows were computed in the step."""

    on_first: list[Callable[[SequenceDelta, Sequence], None]] = field(default_factory=list)
    """Adds to the first record of a sequence."""

    on_tokens: list[Callable[[StepOutcome], None]] = field(default_factory=list)
    """Sees the new tokens of a step that is not steady; sequences may end with them, or without them."""

    extend_output: list[Callable[[StepOutput], Iterable[Sequence]]] = field(default_factory=list)
    """Adds this feature's tokens of the step to the output; gives the sequences that end with them."""

    after_result: list[Callable[[], None]] = field(default_factory=list)
    """All tokens of the step are entered, and those sequences have ended that end with them."""

    on_end: list[Callable[[Sequence], None]] = field(default_factory=list)
    """A sequence has ended for good, after it had a row."""

    on_request_end: list[Callable[[RequestGroup], None]] = field(default_factory=list)
    """A request's last sequence has ended."""

    on_new_weights: list[Callable[[], None]] = field(default_factory=list)
    """The weights are others from now on: what is cached is not found any more."""

    reset_mm_cache: list[Callable[[], None]] = field(default_factory=list)
    """Forgets what was computed of images; rows may be running."""

    stats: list[Callable[[], dict[str, Any]]] = field(default_factory=list)
    """What the feature counts, by its name: its part of ``SchedulerStats``."""

    check_integrity: list[Callable[[], None]] = field(default_factory=list)
    """Asserts that the feature agrees with itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """What the scheduler's features are made of: its state, what puts steps together, and what finds ends.  ``given``
    is from the engine, by feature; ``features`` are those that were made before."""

    state: SchedulerState
    builder: StepScheduler
    stops: StopChecker
    given: Mapping[str, Any]
    features: Iterable[object]


class SchedulerFeature(ABC):
    """The base of all features."""

    @abstractmethod
    def attach(self, hooks: SchedulerHooks) -> None:
        """Append to ``hooks`` what this feature does."""
