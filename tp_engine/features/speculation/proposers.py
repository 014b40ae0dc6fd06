"""Where draft tokens come from: the *sources* of an engine, and how often each of them was right.

::

    source           its draft tokens come from                                             file
    ngram, suffix    the request's own text (prompt lookup), other requests' answers        suffix_proposer.py
    eagle3, mtp      the ranks' draft head                                                  proposer.py
    grammar          what a request's grammar forces; with every method                     proposer.py

Of all proposals for a row, the one likely to be kept longest is verified.  What a grammar forces comes first,
and the others draft what follows it.

*A new source* is a ``Proposer`` in a file of its own, and its method in ``_SOURCES`` and in
``options.METHODS``.  One whose draft tokens are made by the ranks, and come with a step's result,
overrides ``take``: it reads there what the ranks drafted after each row's newest token, keeps it by row in place of
all that it kept before, and ``proposals`` hands it out.  That is in time: a plan that may have draft tokens is made
when no step is in flight (``Speculation.must_wait``), and a row's occupant only changes to one that must compute its
prompt first, in a step whose result replaces the old drafts.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import DraftHeadProposer, GrammarProposer, Proposer
from tp_engine.features.speculation.suffix_proposer import SuffixProposer
from tp_engine.features.structured_output.scheduling import constraint_of
from tp_engine.plan import NO_IDS, IntArray, StepResult
from tp_engine.sched.sequence import Sequence

_LEAST_LIKELIHOOD = 0.15
"""A draft token that is right less often pays in no step; ``StepCosts`` decides about the others."""

_PRIOR_RIGHT, _PRIOR_TRIED = 2.0, 2.5
_KEPT = 1 - 1 / 64  # of both counts, each time a draft token of the kind is considered

_SOURCES: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = MappingProxyType(
    {"ngram": SuffixProposer, "suffix": SuffixProposer, "eagle3": DraftHeadProposer, "mtp": DraftHeadProposer}
)


def make_source(config: SpeculativeConfig) -> Proposer:
    """Return the source of the configuration's method."""
    return _SOURCES[config.method](config)


class Acceptance:
    """How often draft tokens of a source were right, by the length of their match and by their place in the run.  Both
    counts, of right and of tried ones, fade, so that what was bad once is tried again.  A draft token is tried only
    where all before it in its run were right: the share is that of a single place."""

    def __init__(self, most_matched: int, most_tokens: int) -> None:
        self._right: npt.NDArray[np.float64] = np.zeros((most_matched + 1, most_tokens))
        self._tried: npt.NDArray[np.float64] = np.zeros((most_matched + 1, most_tokens))

    def likelihoods(self, matched: int, count: int) -> npt.NDArray[np.float64]:
        """Return the share of runs in which each of ``count`` draft tokens, and all before it, is right."""
        self._right[matched] *= _KEPT
        self._tried[matched] *= _KEPT
        share = (self._right[matched, :count] + _PRIOR_RIGHT) / (self._tried[matched, :count] + _PRIOR_TRIED)
        found: npt.NDArray[np.float64] = share.cumprod()
        return found

    def note(self, matched: int, count: int, num_right: int) -> None:
        """Count a run of ``count`` draft tokens, of which the first ``num_right`` were right."""
        self._right[matched, :num_right] += 1.0
        self._tried[matched, : min(num_right + 1, count)] += 1.0


class DraftPart(NamedTuple):
    """``num_tokens`` draft tokens of ``source`` in a run, found by a match of ``matched`` tokens."""

    source: str
    matched: int
    num_tokens: int


class DraftCandidate(NamedTuple):
    """``tokens`` (n,) that may follow a row's, by the ``parts`` of several sources, cut where they do not pay any more;
    the ``likelihoods`` (n) that a token and all before it are right fall from token to token."""

    tokens: IntArray
    parts: list[DraftPart]
    likelihoods: list[float]


NO_CANDIDATE = DraftCandidate(NO_IDS, [], [])


class Proposers:
    """The sources of an engine, and the acceptance of each, measured for up to ``most_tokens`` draft tokens of a
    row."""

    def __init__(self, sources: Iterable[Proposer], most_tokens: int) -> None:
        self.sources, self._most_tokens, self._forced = list(sources), most_tokens, GrammarProposer()
        longest = {name: most for one in (self._forced, *self.sources) for name, most in one.most_matched.items()}
        self._acceptance = {name: Acceptance(most, most_tokens) for name, most in longest.items()}
        self.counts = dict.fromkeys(longest, (0, 0))  # draft tokens that were verified, and those that were right
        heads = [name for one in self.sources if isinstance(one, DraftHeadProposer) for name in one.most_matched]
        self._head = self._acceptance[heads[0]] if heads else None

    def head_likelihoods(self) -> npt.NDArray[np.float64]:
        """Return how likely the next draft tokens of the ranks' head, if they have one, are right, as far as they may
        pay: each costs a pass."""
        if self._head is None:
            return np.zeros(0)
        found = self._head.likelihoods(0, self._most_tokens)
        return found[found >= _LEAST_LIKELIHOOD]

    @property
    def has_head(self) -> bool:
        """Whether a head on the ranks drafts tokens."""
        return self._head is not None

    def propose(self, sequence: Sequence, tokens: IntArray, count: int) -> DraftCandidate:
        """Up to ``count`` tokens for ``sequence``, which has ``tokens`` (n,), n >= 1.  The source that is
        likely to give the most tokens drafts; of equal ones, the first."""
        if constraint_of(sequence) is None:
            return self._best(self.sources, sequence, tokens, count, 1.0)
        forced = self._best([self._forced], sequence, tokens, count, 1.0)
        if not (left := count - len(forced.tokens)):
            return forced
        behind = np.concatenate((tokens, forced.tokens))
        others = self._best(self.sources, sequence, behind, left, forced.likelihoods[-1] if forced.parts else 1.0)
        return DraftCandidate(
            np.concatenate((forced.tokens, others.tokens)),
            forced.parts + others.parts,
            forced.likelihoods + others.likelihoods,
        )

    def _best(
        self, sources: Iterable[Proposer], sequence: Sequence, tokens: IntArray, count: int, likelihood: float
    ) -> DraftCandidate:
        """That of ``sources``, after tokens that are right with ``likelihood``."""
        best, most = NO_CANDIDATE, 0.0
        for source in sources:
            for drafted, matched, name in source.proposals(sequence, tokens, count):
                found = self._acceptance[name].likelihoods(matched, len(drafted)) * likelihood
                are_tokens = np.logical_and.accumulate(drafted >= 0)  # names of images are none
                paying: list[float] = found[(found >= _LEAST_LIKELIHOOD) & are_tokens].tolist()
                if (expected := sum(paying)) > most:
                    part = DraftPart(name, matched, len(paying))
                    best, most = DraftCandidate(drafted[: len(paying)], [part], paying), expected
        return best

    def note(self, parts: list[DraftPart], num_tokens: int, num_right: int) -> None:
        """Count a run of ``parts``, cut to ``num_tokens``, of which the first ``num_right`` draft tokens were right."""
        first = 0
        for part in parts:
            count = min(part.num_tokens, num_tokens - first)
            if count <= 0:
                break
            right = min(max(num_right - first, 0), count)
            tried, ever_right = self.counts[part.source]
            self.counts[part.source] = tried + count, ever_right + right
            if num_right >= first:
                self._acceptance[part.source].note(part.matched, count, right)
            first += count

    def take(self, result: StepResult) -> None:
        """Let all sources take a step's result."""
        for source in self.sources:
            source.take(result)

    def learn(self, sequence: Sequence) -> None:
        """Let all sources learn from a sequence that has ended."""
        for source in self.sources:
            source.learn(sequence)
