"""What the chunks of a prompt give is kept until its sequence's first record, which has all of it.

A step scores at most half as many positions as it may have tokens.  A scored position takes more time than another (the
whole last layer, the output head, its order of tokens, and its way to the client), for which all others in the step
wait for their next token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tp_engine.features.extension import Extension
from tp_engine.plan import FloatArray, IntArray, StepResult, TokenLogprobs
from tp_engine.requests.request import NOT_FINITE, FinishReason, SequenceDelta
from tp_engine.sched.feature import SchedulerFeature, SchedulerHooks, SchedulerParts
from tp_engine.sched.outcome import slice_logprobs
from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.step_scheduler import StepPlanBuilder


@dataclass(slots=True)
class Kept:
    """What a sequence's chunks have given so far."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[FloatArray] = field(default_factory=list)


KEPT = Extension("prompt_outputs", Kept)


class PromptOutputs(SchedulerFeature):
    """Keeps what the prompts of ``rows`` give; of a step's ``most_tokens``, half are scored at most."""

    def __init__(self, rows: RunningBatch, most_tokens: int) -> None:
        self._rows = rows
        self._most_scored = max(1, most_tokens // 2)
        self._builder = StepPlanBuilder(0, 0)

    def attach(self, hooks: SchedulerHooks) -> None:
        hooks.begin_plan.append(self.begin_plan)
        hooks.limit_chunk.append(self.limit_chunk)
        hooks.on_enter.append(self.on_enter)
        hooks.on_prompts.append(self.on_prompts)
        hooks.on_first.append(self.on_first)

    def begin_plan(self, builder: StepPlanBuilder) -> None:
        """Look at this plan from now on."""
        self._builder = builder

    def limit_chunk(self, sequence: Sequence, start: int, end: int) -> int:
        """End a chunk where the step has no room for further scores."""
        if not sequence.wants_prompt_logprobs:
            return end
        num_scored = sum(count for other, count in self._builder.prefills if other.wants_prompt_logprobs)
        return min(end, start + max(0, self._most_scored - num_scored))

    def on_enter(self, sequence: Sequence) -> None:
        """Forget what was kept before a preemption: it is computed again."""
        sequence.extensions.pop(KEPT.name, None)

    def on_prompts(self, result: StepResult, rows: IntArray) -> None:
        """Keep the log-probabilities of this step's chunks, and what was pooled."""
        if not (result.prompt_logprobs or result.pooled):
            return
        sequences = {sequence.row: sequence for sequence in self._rows.row_set(rows).sequences}
        for row, logprobs in result.prompt_logprobs.items():
            sequence = sequences.get(row)
            if sequence is not None and sequence.wants_prompt_logprobs:
                wanted = sequence.sampling.prompt_logprobs
                KEPT.of(sequence).logprobs.append(slice_logprobs(logprobs, 0, len(logprobs.ranks), wanted))
        for row, values in result.pooled.items():
            if (sequence := sequences.get(row)) is not None:
                KEPT.of(sequence).pooled.append(values)

    def on_first(self, delta: SequenceDelta, sequence: Sequence) -> None:
        """Put into the first record what was kept; what pools ends with it, as its token means nothing."""
        kept = KEPT.get(sequence)
        if kept is not None and kept.pooled:
            delta.pooled, delta.new_token_ids, delta.finish_reason = np.concatenate(kept.pooled), [], FinishReason.STOP
            if not np.isfinite(delta.pooled).all():
                delta.pooled, delta.finish_reason, delta.error = None, FinishReason.ERROR, NOT_FINITE
        if sequence.wants_prompt_logprobs:
            delta.prompt_logprobs = [] if kept is None else kept.logprobs
            sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=-1)
        sequence.extensions.pop(KEPT.name, None)


def make(parts: SchedulerParts) -> Iterator[PromptOutputs]:
    """Make the scheduler's half."""
    yield PromptOutputs(parts.state.rows, parts.state.limits.max_num_batched_tokens)
