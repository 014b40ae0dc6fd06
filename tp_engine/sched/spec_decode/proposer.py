"""What a draft token is, what makes draft tokens, and the simplest sources: the request's own text (prompt lookup), and
drafts of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from tp_engine.plan import NO_IDS, Drafts, IntArray, StepResult
from tp_engine.sched.sequence import Sequence


class Proposal(NamedTuple):
    """``tokens`` (n,) that may follow; they are as likely as others of the same source that were found by a match of so
    many tokens."""

    tokens: IntArray
    matched: int


NO_PROPOSAL = Proposal(NO_IDS, 0)


class Proposer(ABC):
    """Drafts how texts go on.  ``matched`` of its draft tokens is at most ``most_matched``."""

    name: str
    most_matched: int

    @abstractmethod
    def propose(self, sequence: Sequence, tokens: IntArray, count: int) -> Proposal:
        """Up to ``count`` tokens that may follow ``tokens`` (n,), n >= 1, all known ones of ``sequence``."""

    def take(self, result: StepResult) -> None:  # noqa: B027  # most sources need nothing of it
        """The result of a step has come; its tokens are entered next."""

    def learn(self, sequence: Sequence) -> None:  # noqa: B027  # most sources need nothing of it
        """A sequence has ended, with ``sequence.token_ids``."""


class NgramProposer(Proposer):
    """What followed the last tokens where they stood before in the same text::

        tokens   a b c d e f a b c          the last 3 stand at the beginning too
                       ^^^^^                draft token: d e f, and behind the end of the text again a b c ...

    It looks the last ``longest`` tokens up, or fewer down to ``shortest``; of equal matches it takes the last.  It
    keeps nothing: one look costs a comparison of all tokens with the last one, and of the few found with those before.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self.most_matched = longest

    def propose(self, sequence: Sequence, tokens: IntArray, count: int) -> Proposal:
        """Do as ``Proposer``."""
        length, matched = len(tokens), 1
        found = ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        while matched < self.most_matched and len(ends):
            ends = ends[ends >= matched]
            ends = ends[tokens[ends - matched] == tokens[length - 1 - matched]]
            if len(ends):
                found, matched = ends, matched + 1
        if not len(found) or matched < self._shortest:
            return NO_PROPOSAL
        end = int(found[-1])
        # A draft token that reaches the end of the text goes on with itself: the text repeats with this period.
        places = end + 1 + np.arange(count) % (length - 1 - end)
        return Proposal(tokens[places], matched)


class DraftHeadProposer(Proposer):
    """What the ranks drafted in the last step behind each row's newest token, by a head or by prompt lookup.

    Nothing for a request with a grammar: what that forces comes first, so these drafts are behind another token.
    """

    def __init__(self, name: str, most_matched: int = 0) -> None:
        self.name, self.most_matched = name, most_matched
        self._drafts: dict[int, Drafts] = {}

    def propose(self, sequence: Sequence, tokens: IntArray, count: int) -> Proposal:
        """Do as ``Proposer``."""
        drafts = None if sequence.constraint is not None else self._drafts.get(sequence.row)
        return NO_PROPOSAL if drafts is None else Proposal(drafts.tokens[:count], drafts.matched)

    def take(self, result: StepResult) -> None:
        """Do as ``Proposer``."""
        self._drafts = result.drafts
