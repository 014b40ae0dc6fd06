"""What a step gave each sequence, in columns; turned into records at the engine's edge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tp_engine.plan import IntArray, StepResult, TokenLogprobs
from tp_engine.request import FinishReason, SequenceDelta
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.stop_check import Ending


@dataclass(slots=True)
class StepOutcome:
    """The new token of each of ``sequences``, in the step's batch order.

    ``endings`` and ``logprobs`` are by position, for those few that have one; ``first`` are the positions of the
    sequences that got their first token.
    """

    sequences: list[Sequence]
    token_ids: IntArray
    endings: dict[int, Ending] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    first: list[int] = field(default_factory=list)

    def deltas(self) -> list[SequenceDelta]:
        """One record per sequence.  To be called once: prompt logprobs go out with it."""
        made = [
            SequenceDelta(
                request_id=sequence.group.request.request_id,
                index=sequence.index,
                new_token_ids=[token_id],
                first_scheduled_s=sequence.first_scheduled_s,
            )
            for sequence, token_id in zip(self.sequences, self.token_ids.tolist(), strict=True)
        ]
        for position, end in self.endings.items():
            made[position].finish_reason, made[position].stop_reason = end.reason, end.stop_reason
        for position, logprobs in self.logprobs.items():
            made[position].logprobs = logprobs
        for position in self.first:
            _add_first(made[position], self.sequences[position])
        return made


def aborted(sequence: Sequence) -> SequenceDelta:
    """The last record of a sequence that was aborted."""
    return SequenceDelta(
        request_id=sequence.request_id,
        index=sequence.index,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        first_scheduled_s=sequence.first_scheduled_s,
    )


def slice_logprobs(logprobs: TokenLogprobs, start: int, end: int, num_alternatives: int) -> TokenLogprobs:
    """Rows ``start`` to ``end`` with as many alternatives as this request asked for."""
    columns = num_alternatives + 1
    return TokenLogprobs(
        token_ids=logprobs.token_ids[start:end, :columns],
        logprobs=logprobs.logprobs[start:end, :columns],
        ranks=logprobs.ranks[start:end],
    )


def collect_prompt_logprobs(result: StepResult, sequences: dict[int, Sequence]) -> None:
    """Keep the prompt log-probabilities of this step's chunks, by row, until each sequence's first record."""
    for row, logprobs in result.prompt_logprobs.items():
        sequence = sequences.get(row)
        if sequence is not None and sequence.wants_prompt_logprobs:
            wanted = sequence.sampling.prompt_logprobs
            sequence.prompt_logprobs.append(slice_logprobs(logprobs, 0, len(logprobs.ranks), wanted))


def _add_first(delta: SequenceDelta, sequence: Sequence) -> None:
    delta.num_cached_tokens = sequence.num_cached_tokens
    delta.prompt_logprobs = sequence.prompt_logprobs
    sequence.prompt_logprobs = []
    if sequence.wants_prompt_logprobs:
        sequence.sampling = replace(sequence.sampling, prompt_logprobs=-1)
