"""When a sequence ends by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_engine.plan import IntArray
from tp_engine.request import FinishReason
from tp_engine.sched.sequence import RequestGroup, Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended; ``stop_reason`` is the id among ``stop_token_ids`` that did it.

    ``by_grammar``: its grammar allows no more, so that its last token is no stop token; ``error``: what went wrong.
    """

    reason: FinishReason
    stop_reason: int | None = None
    by_grammar: bool = False
    error: str | None = None


class StopChecker:
    """Finds the few rows that may end by array operations, then looks closely at those only.

    ``_watched`` is a table over token ids: True where the id can end *some* request.  It reaches one beyond the
    largest such id and stays False there, so that larger ids can be clipped to it.
    """

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()
        self._watched: npt.NDArray[np.bool_] = np.zeros(1, dtype=np.bool_)

    def watch(self, group: RequestGroup) -> None:
        """A request has come in."""
        ids = group.eos_token_ids | group.stop_token_ids
        changed = any(token_id not in self._count for token_id in ids)
        self._count.update(ids)
        if changed:
            self._rebuild()

    def unwatch(self, group: RequestGroup) -> None:
        """A request has ended."""
        ids = group.eos_token_ids | group.stop_token_ids
        self._count.subtract(ids)
        gone = [token_id for token_id in ids if self._count[token_id] == 0]
        for token_id in gone:
            del self._count[token_id]
        if gone:
            self._rebuild()

    def may_stop(self, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Which of ``token_ids`` (n,) end some request."""
        found: npt.NDArray[np.bool_] = self._watched.take(token_ids, mode="clip")
        return found

    def may_any_stop(self, token_ids: IntArray) -> bool:
        """Whether any of ``token_ids`` ends some request; a byte string is searched in half the time of an array."""
        return True in self._watched.take(token_ids, mode="clip").tobytes()

    def _rebuild(self) -> None:
        ids = list(self._count)
        self._watched = np.zeros(max(ids, default=-1) + 2, dtype=np.bool_)
        self._watched[ids] = True


def ending(sequence: Sequence, token_id: int, num_tokens: int, max_tokens: int) -> Ending | None:
    """How the sequence ends with ``token_id``, its ``num_tokens``-th token; None if it goes on.

    A stop counts once ``min_tokens`` generated tokens precede it, and before the limit of length.
    """
    group = sequence.group
    num_before = num_tokens - sequence.num_prompt_tokens - 1
    if num_before >= sequence.sampling.min_tokens:
        if token_id in group.eos_token_ids:
            return Ending(FinishReason.STOP)
        if token_id in group.stop_token_ids:
            return Ending(FinishReason.STOP, token_id)
    return Ending(FinishReason.LENGTH) if num_tokens >= max_tokens else None
