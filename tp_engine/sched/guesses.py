"""Guesses from a request's own text: what followed the last tokens where they stood before (prompt lookup).

::

    tokens   a b c d e f a b c          the last 3 stand at the beginning too
                   ^^^^^                guess: d e f, and behind the end of the text again a b c ...
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tp_engine.plan import NO_IDS, IntArray

_PRIOR_RIGHT, _PRIOR_TRIED = 2.0, 2.5
_KEPT = 1 - 1 / 64  # of what was measured, when a guess of the kind is considered again


class Guess(NamedTuple):
    """``tokens`` (n,) that may follow; they are as likely as others that were found by a match of so many tokens."""

    tokens: IntArray
    matched: int


NO_GUESS = Guess(NO_IDS, 0)


class Guesser(Protocol):
    """Guesses how texts go on."""

    most_matched: int

    def guess(self, tokens: IntArray, count: int) -> Guess:
        """Up to ``count`` tokens that may follow ``tokens`` (n,), n >= 1; ``matched`` is at most ``most_matched``."""


class NgramGuesser:
    """Looks the last ``longest`` tokens up, or fewer down to ``shortest``; of equal matches it takes the last.

    It keeps nothing: one look costs a comparison of all tokens with the last one, and of the few found with those
    before.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self.most_matched = longest

    def guess(self, tokens: IntArray, count: int) -> Guess:
        """See ``Guesser``."""
        length, matched = len(tokens), 1
        found = ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        while matched < self.most_matched and len(ends):
            ends = ends[ends >= matched]
            ends = ends[tokens[ends - matched] == tokens[length - 1 - matched]]
            if len(ends):
                found, matched = ends, matched + 1
        if not len(found) or matched < self._shortest:
            return NO_GUESS
        end = int(found[-1])
        # A guess that reaches the end of the text goes on with itself: the text repeats with this period.
        places = end + 1 + np.arange(count) % (length - 1 - end)
        return Guess(tokens[places], matched)


class Acceptance:
    """How often guesses were right, by the length of their match and by their place in the run.

    Both counts, of right and of tried ones, fade, so that what was bad once is tried again.

    A guess is tried only where all before it in its run were right: the share is that of a single place.
    """

    def __init__(self, most_matched: int, most_tokens: int) -> None:
        self._right: npt.NDArray[np.float64] = np.zeros((most_matched + 1, most_tokens))
        self._tried: npt.NDArray[np.float64] = np.zeros((most_matched + 1, most_tokens))

    def likelihoods(self, matched: int, count: int) -> npt.NDArray[np.float64]:
        """For each of ``count`` guesses the share of runs in which it and all before it are right."""
        self._right[matched] *= _KEPT
        self._tried[matched] *= _KEPT
        share = (self._right[matched, :count] + _PRIOR_RIGHT) / (self._tried[matched, :count] + _PRIOR_TRIED)
        found: npt.NDArray[np.float64] = share.cumprod()
        return found

    def note(self, matched: int, count: int, num_right: int) -> None:
        """Of a run of ``count`` guesses the first ``num_right`` were right."""
        self._right[matched, :num_right] += 1.0
        self._tried[matched, : min(num_right + 1, count)] += 1.0
