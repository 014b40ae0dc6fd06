"""What a step gave each sequence, in columns; the few with more than a token to tell get a record."""

from __future__ import annotations

import msgspec

from tp_engine.plan import IntArray, StepResult, TokenLogprobs
from tp_engine.request import FinishReason, SequenceDelta, StepOutput
from tp_engine.sched.row_set import RowSet
from tp_engine.sched.sequence import Sequence
from tp_engine.sched.stop_check import Ending


class StepOutcome(msgspec.Struct, gc=False):
    """The new token of each of ``sequences``, in the step's batch order.

    ``endings`` and ``logprobs`` are by position, for those few that have one; ``first`` are the positions of the
    sequences that got their first token, ``dropped`` of those that end without the token that they got.
    """

    rows: RowSet
    token_ids: IntArray
    endings: dict[int, Ending] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    first: set[int] = set()
    dropped: list[int] = []

    @property
    def sequences(self) -> list[Sequence]:
        """Who got a token."""
        return self.rows.sequences

    def output(self) -> StepOutput:
        """For the engine's caller.  To be called once: prompt logprobs go out with it."""
        request_ids, indices = self.rows.names
        token_ids = self.token_ids.tolist()
        if not (self.endings or self.logprobs or self.first):
            return StepOutput(request_ids=request_ids, indices=indices, token_ids=token_ids)
        request_ids, indices = request_ids.copy(), indices.copy()
        special = sorted({*self.endings, *self.logprobs, *self.first})
        deltas = [self._delta(position, request_ids, indices, token_ids) for position in special]
        for position in reversed(special):
            del request_ids[position], indices[position], token_ids[position]
        return StepOutput(request_ids=request_ids, indices=indices, token_ids=token_ids, deltas=deltas)

    def _delta(self, position: int, request_ids: list[str], indices: list[int], token_ids: list[int]) -> SequenceDelta:
        sequence = self.sequences[position]
        delta = SequenceDelta(
            request_id=request_ids[position],
            index=indices[position],
            new_token_ids=[token_ids[position]],
            logprobs=self.logprobs.get(position),
            first_scheduled_s=sequence.first_scheduled_s,
        )
        if (end := self.endings.get(position)) is not None:
            delta.finish_reason, delta.stop_reason = end.reason, end.stop_reason
            delta.ends_with_text, delta.error = end.by_grammar, end.error
        if position in self.dropped:
            delta.new_token_ids, delta.logprobs = [], None
        if position in self.first:
            _add_first(delta, sequence)
        return delta


def aborted(sequence: Sequence, error: str | None = None) -> SequenceDelta:
    """The last record of a sequence that was aborted, or that ended with an ``error``."""
    return SequenceDelta(
        request_id=sequence.request_id,
        index=sequence.index,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT if error is None else FinishReason.ERROR,
        first_scheduled_s=sequence.first_scheduled_s,
        error=error,
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
    if sequence.wants_prompt_logprobs:
        delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=-1)
