"""The scheduler: continuous batching over a paged KV cache, on rank 0.

One step::

    schedule()                                               update()
      decodes -> running prefills -> admissions                append tokens -> publish full blocks -> stops
         |            |                 |
         +--- one budget of tokens -----+---> StepPlan --> all ranks --> StepResult

``schedule`` moves only *scheduled* counts and ``update`` only *known* ones (tokens, computed counts), so that plans may
run ahead of results: each row of the next plan goes one token further, whatever that token will be.  A sequence that
turns out to have ended one step earlier has had one token too many computed, which is dropped.  No sequence is
preempted while a result is outstanding, because the result may end sequences and free their blocks.

Most steps are *steady*: the rows of the step before go on decoding, and nothing else happens.  ``SteadySteps`` does
both halves of these in a few operations.

What is optional (adapters, tiers, speculation) is a feature in a list, whose hooks are called here (``feature.py``).

Blocks that a prompt fills are published at once, because others wait for them.  Those that decoding fills are published
when the sequence leaves its row, which keeps hashing out of the steady step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.errors import RequestError
from tp_engine.features.registry import Half, find_half, halves
from tp_engine.plan import IntArray, StepPlan, StepResult
from tp_engine.requests.request import EngineRequest, SequenceDelta, StepOutput
from tp_engine.sched.admission import Admitter
from tp_engine.sched.blocks.cache_keys import THE_MODEL, CacheKeys, Variant
from tp_engine.sched.decode_run import RowSet
from tp_engine.sched.fair_rows import FairRows
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.sched.outcome import StepOutcome, StopChecker, aborted, ending, slice_logprobs
from tp_engine.sched.readiness import Blocked
from tp_engine.sched.request_validation import build_group
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.sched.sequence import RequestGroup, Sequence, SequencePhase
from tp_engine.sched.steady_steps import SteadySteps
from tp_engine.sched.step_scheduler import StepPlanBuilder, StepScheduler
from tp_engine.sched.view import SchedulerStats, SchedulerView, ViewLimits, stats_of, view_scheduler

__all__ = ["Scheduler", "SchedulerLimits"]

NOTHING_GIVEN: Mapping[str, Any] = MappingProxyType({})


class Scheduler:
    """Decides what each step computes; single-threaded, deterministic."""

    def __init__(
        self,
        limits: SchedulerLimits,
        given: Mapping[str, Any] = NOTHING_GIVEN,
    ) -> None:
        """``given`` has, by feature, what it needs of the world."""
        self._limits = limits
        self.state = SchedulerState(limits)
        self._builder = StepScheduler(self.state)
        self._stops = StopChecker()
        self._fair_rows = FairRows(self.state)
        self._steady = SteadySteps(self.state, self._stops, self._fair_rows)
        self._features: list[SchedulerFeature] = []
        parts = SchedulerParts(
            state=self.state,
            builder=self._builder,
            stops=self._stops,
            given=given,
            features=self._features,
        )
        self._features += halves("scheduler", parts)
        self._hooks = SchedulerHooks()
        for feature in self._features:
            feature.attach(self._hooks)
        self.state.on_make, self.state.on_leave = self._hooks.on_make, self._hooks.on_leave
        self.state.limit_chunk = self._hooks.limit_chunk
        self._cache_keys = CacheKeys(self._hooks.cache_salt, self._hooks.variant)
        self._admitter = Admitter(self.state, self._hooks)
        self._groups: dict[str, RequestGroup] = {}
        self._num_requests = self._num_bodies = 0
        self._step_id = 0
        self._departures: deque[int] = deque()  # of each step in flight, before it was made

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self._groups)

    @property
    def num_unfinished(self) -> int:
        """Requests that still wait or run."""
        return len(self._groups)

    @property
    def next_step_id(self) -> int:
        """The id that the next plan will carry; the first is 1."""
        return self._step_id + 1

    def feature(self, kind: type[Half]) -> Half | None:
        """Return the feature of this kind; None if it is switched off."""
        return find_half(self._features, kind)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; one with a grammar waits for it first.  Raises ``RequestError``, and changes
        nothing, for one that can never be served."""
        if request.request_id in self._groups:
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose one that no unfinished request has",
                param="request_id",
            )
        for resolve in self._hooks.resolve:
            request = resolve(request)
        num_bodies = self._num_bodies + (request.place == 0)
        group = build_group(request, self._limits, self._num_requests, num_bodies, self._cache_keys)
        self._num_requests, self._num_bodies = self._num_requests + 1, num_bodies
        self._groups[request.request_id] = group
        self._stops.watch(group)
        self.state.num_unmade += group.num_unmade
        (first,) = group.sequences
        first.blocked = Blocked.MASK if request.is_constrained else Blocked.NOTHING
        self.state.wait(first)
        for on_add in self._hooks.on_add:
            on_add(group)

    def prefetch_session(self, session: str, salt: str, variant: Variant = THE_MODEL) -> None:
        """Prefetch for a client's session (``SamplingParams.prompt_cache_key``), which will go on soon: what it ended
        with is brought back from the host or the disk, as far as there is room."""
        for announce in self._hooks.announce:
            announce(session, self._cache_keys.of(salt, variant), self.next_step_id)

    def abort(
        self, request_ids: Iterable[str] | None, error: str | None = None, error_code: str | None = None
    ) -> list[SequenceDelta]:
        """End these requests now (None: all), because of an ``error`` if there is one; unknown ids are ignored.
        Returns a last record of each unfinished sequence."""
        deltas: list[SequenceDelta] = []
        for request_id in list(self._groups) if request_ids is None else request_ids:
            group = self._groups.get(request_id)
            if group is None:
                continue
            unmade = self._give_up_unmade(group)
            for sequence in group.sequences:
                if sequence.phase is not SequencePhase.FINISHED:
                    deltas.append(aborted(group, sequence.index, error, error_code, sequence.first_scheduled_s))
                    self._finish(sequence)
            deltas += [aborted(group, index, error, error_code) for index in unmade]
        return deltas

    def preempt_all(self) -> None:
        """Preempt every running sequence: it waits again, with tokens, without blocks.  No step may be in flight."""
        assert not self._departures, "a step is in flight"
        self.state.preempt_all()

    def renew_cache_keys(self) -> None:
        """Hide all that is cached, because the weights changed.  No sequence may be running."""
        assert not self.state.rows.num_running, "a row has K/V of the old weights"
        self._cache_keys.renew(self._groups.values())
        for on_new_weights in self._hooks.on_new_weights:
            on_new_weights()

    def schedule(self) -> StepPlan | None:
        """Return the next step; None if there is nothing to run, or nothing until a result of the steps in flight is
        there.  The next plan releases the rows that were left meanwhile."""
        for poll in self._hooks.poll:
            poll()
        if self._departures and any(must_wait() for must_wait in self._hooks.must_wait):
            return None
        may_be_steady = True
        for wants_step in () if self._departures else self._hooks.wants_step:
            may_be_steady &= not wants_step()
        plan = (self._steady.schedule(self._step_id + 1) if may_be_steady else None) or self._schedule_any()
        if plan is None:
            return None
        for finish in self._hooks.finish_plan:
            plan = finish(plan)
        self._step_id = plan.step_id
        self._departures.append(self.state.rows.num_departures)
        for after in self._hooks.after_plan:
            after(self._step_id)
        return plan

    def _schedule_any(self) -> StepPlan | None:
        if self.state.waiting and self._fair_rows.are_due:
            if self._departures:
                return None
            self._fair_rows.make_room()
        builder = StepPlanBuilder(
            self.next_step_id, self._limits.max_num_batched_tokens, may_preempt=not self._departures
        )
        for begin in self._hooks.begin_plan:
            begin(builder)
        self._builder.schedule_decodes(builder)
        if builder.stalled:
            return None
        self._builder.schedule_prefills(builder)
        if self.state.waiting and not builder.short:
            self._admitter.admit(builder)
        for extend in self._hooks.extend_plan:
            extend(builder)
        plan = builder.advance(self.state)
        if plan is None and not self._departures and any(must_send() for must_send in self._hooks.must_send):
            plan = StepPlan(step_id=builder.step_id)
        return plan

    def schedule_bare(self, finish: Callable[[StepPlan], StepPlan]) -> StepPlan | None:
        """Return a plan without rows, with what ``finish`` adds; None if that is nothing.  No step may be in flight."""
        assert not self._departures, "a step is in flight"
        bare = StepPlan(step_id=self.next_step_id)
        plan = finish(bare)
        if plan is bare:
            return None
        self._step_id = plan.step_id
        self._departures.append(self.state.rows.num_departures)
        return plan

    def skip_step(self) -> int:
        """Return the id of a plan without rows, which has no result.  No step may be in flight."""
        assert not self._departures, "a plan without rows would be taken for the result of one that has some"
        self._step_id += 1
        return self._step_id

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Enter the result of the oldest step in flight.  Rows whose occupant left meanwhile are skipped."""
        expected = self._step_id - len(self._departures) + 1
        assert result.step_id == plan.step_id == expected, (
            f"result {result.step_id} of plan {plan.step_id}: {expected} is due"
        )
        may_have_left = self._departures.popleft() != self.state.rows.num_departures
        for on_result in self._hooks.on_result:
            plan, result = on_result(plan, result)
        output = self._steady.update(plan, result)
        if output is None:
            output = self._update_any(plan, result, may_have_left)
        for extend in self._hooks.extend_output:
            for sequence in extend(output):
                self._finish(sequence)
        for after in self._hooks.after_result:
            after()
        return output

    def _update_any(self, plan: StepPlan, result: StepResult, may_have_left: bool) -> StepOutput:
        rows = self.state.rows
        sampled, token_ids, epoch = plan.decode_rows, result.token_ids, plan.rows_epoch
        positions: npt.NDArray[np.intp] | None = None
        if len(plan.prefill_rows):
            sampled, epoch = plan.sampled_rows, 0
            self._confirm_prefills(plan, result)
        assert len(token_ids) == len(sampled), f"{len(token_ids)} tokens for {len(sampled)} sampled rows"
        num_decodes = len(plan.decode_rows)
        if may_have_left:
            positions = np.flatnonzero(rows.since_step[sampled] <= plan.step_id)
            sampled, token_ids, epoch = sampled[positions], token_ids[positions], 0
            num_decodes = int((rows.since_step[plan.decode_rows] <= plan.step_id).sum())
        outcome = self._append(num_decodes, rows.row_set(sampled, epoch), token_ids)
        if result.logprobs is not None:
            asked = rows.num_logprobs[sampled]
            for position in np.flatnonzero(asked >= 0).tolist():
                source = position if positions is None else int(positions[position])
                outcome.logprobs[position] = slice_logprobs(result.logprobs, source, source + 1, int(asked[position]))
        for position in outcome.endings:
            self._finish(outcome.sequences[position])
        return outcome.output(self._hooks.on_first)

    def stats(self) -> SchedulerStats:
        """Return a snapshot of queue, pool and totals."""
        return stats_of(self.state, {name: value for stats in self._hooks.stats for name, value in stats().items()})

    def view(self, limits: ViewLimits) -> SchedulerView:
        """Return the pool and the running sequences, for display; costs nothing until it is called."""
        return view_scheduler(self.state, limits)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes.  False, and nothing is changed, while a sequence is running."""
        if self.state.rows.num_running:
            return False
        self.state.blocks.clear_cache()
        return True

    def reset_mm_cache(self) -> None:
        """Forget all embeddings of images: those that prompts need are encoded again."""
        for reset in self._hooks.reset_mm_cache:
            reset()

    def check_integrity(self) -> None:
        """Assert that all parts agree; for idle times and tests."""
        self.state.check_integrity()
        for check_integrity in self._hooks.check_integrity:
            check_integrity()
        counts = np.array([group.check_integrity() for group in self._groups.values()]).reshape(-1, 3).sum(axis=0)
        num_parked = self.state.num_parked
        assert counts.tolist() == [self.state.rows.num_running, self.state.num_waiting, num_parked]
        assert self.state.num_unmade == sum(group.num_unmade for group in self._groups.values())

    def _confirm_prefills(self, plan: StepPlan, result: StepResult) -> None:
        """The chunks of this step are computed."""
        rows = self.state.rows
        prefilled = plan.prefill_rows.astype(np.intp)
        living = rows.since_step[prefilled] <= plan.step_id
        confirmed = prefilled[living]
        rows.num_computed[confirmed] += plan.prefill_tokens[living]
        for on_prompts in self._hooks.on_prompts:
            on_prompts(result, plan.prefill_rows[living])

    def _append(self, num_decodes: int, sampled: RowSet, token_ids: IntArray) -> StepOutcome:
        """Each sampled row has one more token; some after the ``num_decodes`` got their first one, some end."""
        rows = self.state.rows
        outcome = StepOutcome(sampled, token_ids)
        lengths = rows.append(sampled, token_ids)
        for position in range(num_decodes, len(token_ids)):
            sequence = outcome.sequences[position]
            if not sequence.emitted:
                sequence.emitted = True
                outcome.first.add(position)
        may_end = self._stops.may_stop(token_ids)
        if rows.num_ending:
            may_end |= rows.phase[sampled.rows] == SequencePhase.ENDING
        if np.count_nonzero(may_end):
            for position in np.flatnonzero(may_end).tolist():
                sequence = outcome.sequences[position]
                most = int(rows.max_total_tokens[sequence.row])
                end = ending(sequence, int(token_ids[position]), int(lengths[position]), most)
                if end is not None:
                    outcome.endings[position] = end
        for on_tokens in self._hooks.on_tokens:
            on_tokens(outcome)
        return outcome

    def _give_up_unmade(self, group: RequestGroup) -> range:
        """Give up the sequences of a request that have not been made, and return their indices."""
        num_made = len(group.sequences)
        given_up = range(num_made, num_made + group.num_unmade)
        self.state.num_unmade -= group.num_unmade
        group.num_unfinished -= group.num_unmade
        group.num_unmade = 0
        return given_up

    def _finish(self, sequence: Sequence) -> None:
        """The sequence ends for good; with its last one the request is forgotten."""
        if sequence.phase is SequencePhase.WAITING:
            sequence.phase = SequencePhase.FINISHED
            if sequence.blocked:
                sequence.blocked = Blocked.NOTHING
                self.state.num_parked -= 1
            else:
                self.state.waiting.forget(sequence)
        else:
            self.state.leave(sequence, SequencePhase.FINISHED)
            for on_end in self._hooks.on_end:
                on_end(sequence)
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            del self._groups[group.request.request_id]
            self._stops.unwatch(group)
            for on_request_end in self._hooks.on_request_end:
                on_request_end(group)
