"""A proposal of draft tokens, what makes some, and the simplest sources: what a grammar forces, and the draft head."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.structured_output.scheduling import constraint_of
from tp_engine.plan import IntArray, StepResult
from tp_engine.sched.sequence import Sequence


class Proposal(NamedTuple):
    """``tokens`` (n,), n >= 1, that may follow; they are as likely as others of the same ``source`` that were found by
    a match of so many tokens."""

    tokens: IntArray
    matched: int
    source: str


class Proposer(ABC):
    """Drafts how texts go on.  ``most_matched`` has the names of its proposals' sources, and their longest matches."""

    most_matched: Mapping[str, int]

    @abstractmethod
    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> Iterable[Proposal]:
        """Up to ``count`` tokens that may follow ``tokens`` (n,), n >= 1, all known ones of ``sequence``."""

    def take(self, result: StepResult) -> None:  # noqa: B027  # most sources need nothing of it
        """Take a step's result, whose tokens are entered next."""

    def learn(self, sequence: Sequence) -> None:  # noqa: B027  # most sources need nothing of it
        """Learn from a sequence that has ended with ``sequence.token_ids``."""


class GrammarProposer(Proposer):
    """Drafts what the grammar forces, such as the keys of a schema, as a tokenizer would write it.  Where tokens could
    be cut otherwise too, that is a draft token like any other."""

    most_matched = MappingProxyType({"grammar": 0})

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> Iterable[Proposal]:
        if (constraint := constraint_of(sequence)) is not None and (forced := constraint.forced()):
            yield Proposal(np.array(forced[:count], dtype=np.int32), 0, "grammar")


class DraftHeadProposer(Proposer):
    """What the ranks' draft head made in the last step after each row's newest token.  Nothing for a request with a
    grammar: what that forces comes first, so these drafts are after another token."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._name, self._drafts = config.method, dict[int, IntArray]()
        self.most_matched = {self._name: 0}

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> Iterable[Proposal]:
        drafts = None if constraint_of(sequence) is not None else self._drafts.get(sequence.row)
        if drafts is not None and len(drafts):
            yield Proposal(drafts[:count], 0, self._name)

    def take(self, result: StepResult) -> None:
        self._drafts = result.drafts
