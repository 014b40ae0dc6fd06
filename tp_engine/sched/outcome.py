"""What a step gave each sequence: its token, in columns, and a record for the few that end or have more to tell."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray, TokenLogprobs
from tp_engine.requests.request import FinishReason, SequenceDelta, StepOutput
from tp_engine.sched.decode_run import RowSet
from tp_engine.sched.sequence import RequestGroup, Sequence

OnFirst: TypeAlias = Iterable[Callable[[SequenceDelta, Sequence], None]]


@dataclass(frozen=True, slots=True)
class FinishDetails:
    """Why a sequence ended; ``stop_reason`` is the id among ``stop_token_ids`` that ended it.  ``by_grammar``: its
    grammar allows no more, so that its last token is not a stop token; ``error``: why no token can follow, though the
    output is not complete, with its code."""

    reason: FinishReason
    stop_reason: int | None = None
    by_grammar: bool = False
    error: str | None = None
    error_code: str | None = None

    def enter(self, delta: SequenceDelta) -> None:
        """``delta`` is the last one of its sequence."""
        delta.finish_reason, delta.stop_reason = self.reason, self.stop_reason
        delta.ends_with_text, delta.error, delta.error_code = self.by_grammar, self.error, self.error_code


class StepOutcome(msgspec.Struct, gc=False):
    """The new token of each of ``sequences``, in the step's batch order.  ``endings`` and ``logprobs`` are by position,
    for the few sequences that have one; ``first`` are the positions of the sequences that got their first token,
    ``dropped`` of those that end without the token that they got."""

    rows: RowSet
    token_ids: IntArray
    endings: dict[int, FinishDetails] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    first: set[int] = set()
    dropped: list[int] = []

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that got a token."""
        return self.rows.sequences

    def output(self, on_first: OnFirst = ()) -> StepOutput:
        """Return what the step brought, for the engine's caller; ``on_first`` add to a sequence's first record.  Call
        it once: what prompts gave goes out with it."""
        request_ids, indices = self.rows.names
        token_ids = self.token_ids.tolist()
        if not (self.endings or self.logprobs or self.first):
            return StepOutput(request_ids=request_ids, indices=indices, token_ids=token_ids)
        request_ids, indices = request_ids.copy(), indices.copy()
        special = sorted({*self.endings, *self.logprobs, *self.first})
        deltas = [self._delta(position, request_ids, indices, token_ids) for position in special]
        for position, delta in zip(special, deltas, strict=True):
            if position in self.first:
                delta.num_cached_tokens = self.sequences[position].num_cached_tokens
                for add in on_first:
                    add(delta, self.sequences[position])
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
            end.enter(delta)
        if position in self.dropped:
            delta.new_token_ids, delta.logprobs = [], None
        return delta


class StopChecker:
    """Finds the few rows that may end by array operations; ``ending`` then looks at those alone.  ``_watched`` is a
    table over token ids: True where the id can end *some* request.  It reaches one beyond the largest such id and stays
    False there, so that larger ids can be clipped to it."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()
        self._watched: npt.NDArray[np.bool_] = np.zeros(1, dtype=np.bool_)

    def watch(self, group: RequestGroup) -> None:
        """Count the stop tokens of a request that has come in."""
        ids = group.eos_token_ids | group.stop_token_ids
        changed = any(token_id not in self._count for token_id in ids)
        self._count.update(ids)
        if changed:
            self._rebuild()

    def unwatch(self, group: RequestGroup) -> None:
        """Stop counting the stop tokens of a request that has ended."""
        ids = group.eos_token_ids | group.stop_token_ids
        self._count.subtract(ids)
        gone = [token_id for token_id in ids if self._count[token_id] == 0]
        for token_id in gone:
            del self._count[token_id]
        if gone:
            self._rebuild()

    def may_stop(self, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of ``token_ids`` (n,) end some request."""
        found: npt.NDArray[np.bool_] = self._watched.take(token_ids, mode="clip")
        return found

    def may_any_stop(self, token_ids: IntArray) -> bool:
        """Return whether any of ``token_ids`` ends some request; a byte string is searched in half the time of an
        array."""
        return True in self._watched.take(token_ids, mode="clip").tobytes()

    def _rebuild(self) -> None:
        ids = list(self._count)
        self._watched = np.zeros(max(ids, default=-1) + 2, dtype=np.bool_)
        self._watched[ids] = True


def ending(sequence: Sequence, token_id: int, num_tokens: int, max_total_tokens: int) -> FinishDetails | None:
    """Return how the sequence ends with ``token_id``, its ``num_tokens``-th token; None if it goes on.  A stop token
    counts once ``min_tokens`` generated tokens precede it, and before the limit of length."""
    group = sequence.group
    num_before = num_tokens - sequence.num_prompt_tokens - 1
    if num_before >= sequence.sampling.min_tokens:
        if token_id in group.eos_token_ids:
            return FinishDetails(FinishReason.STOP)
        if token_id in group.stop_token_ids:
            return FinishDetails(FinishReason.STOP, token_id)
    return FinishDetails(FinishReason.LENGTH) if num_tokens >= max_total_tokens else None


def aborted(
    group: RequestGroup,
    index: int,
    error: str | None = None,
    error_code: str | None = None,
    first_scheduled_s: float = 0.0,
) -> SequenceDelta:
    """Return the last record of the sequence ``index``, which was aborted, or ended with an ``error``."""
    return SequenceDelta(
        request_id=group.request.request_id,
        index=index,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT if error is None else FinishReason.ERROR,
        first_scheduled_s=first_scheduled_s,
        error=error,
        error_code=error_code,
    )


def slice_logprobs(logprobs: TokenLogprobs, start: int, end: int, num_alternatives: int) -> TokenLogprobs:
    """Rows ``start`` to ``end`` with as many alternatives as this request asked for."""
    columns = num_alternatives + 1
    return TokenLogprobs(
        token_ids=logprobs.token_ids[start:end, :columns],
        logprobs=logprobs.logprobs[start:end, :columns],
        ranks=logprobs.ranks[start:end],
    )
