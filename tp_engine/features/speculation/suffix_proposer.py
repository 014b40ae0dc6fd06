"""Draft tokens from text: what followed the last tokens where they stood in the request's own text, or in past answers.

*Own text* (prompt lookup; the method ``ngram`` has this alone)::

    tokens   a b c d e f a b c          the last 3 stand at the beginning too
                   ^^^^^                proposal: d e f, and after the end of the text again a b c ...

The last ``prompt_lookup_max`` tokens are looked up, or fewer down to ``prompt_lookup_min``; of equal matches the last
counts.  Nothing is kept: one look costs a comparison of all tokens with the last one, and of the few found with those
before.

*Past answers* are kept in one ring of tokens, oldest overwritten first.  A place is found by the hash of the 3 or 8
tokens that end there (``_ANCHORS``): a table has the last place of each hash, and each place the one before it with the
same hash, so that a look-up goes through a few places and learning an answer is a few array operations::

    ring      | -1 | p p p a a a a a | -1 | p p a a a a | -1 | ..... free or overwritten ..... |
                     ^ prompt's end, then the answer           ^ _head, counted on and on; & mask is the place
    heads      hash of (a a a) ------------> 12 -- links --> 5 -- links --> 0

Of the places with the longest match all answers count: a drafted token is as likely as its share of them (suffix
decoding: Oliaro et al. 2024, https://arxiv.org/abs/2411.04975).  Only answers with the cache key of the request are
found: ``RequestGroup.cache_key``, under which the prefix cache keeps its blocks too.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.proposer import Proposal, Proposer
from tp_engine.plan import IntArray
from tp_engine.sched.sequence import Sequence

_ANCHORS = (3, 8)
_MOST_PLACES, _MOST_STEPS = 16, 64  # of one look-up: the last places that fit, among so many
_BITS = 20  # of the ring's tokens, which with its tables have at most 44 MiB
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_GAP = -1  # between two answers

_Numbers = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]


class SuffixProposer(Proposer):
    """See the module's text.  ``bits`` are those of the ring's tokens."""

    def __init__(self, config: SpeculativeConfig, bits: int = _BITS) -> None:
        keeps_answers = config.method == "suffix"
        self._depth = depth = config.suffix_decoding_max_tree_depth
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max
        self.most_matched = ({"suffix": depth} if keeps_answers else {}) | {"ngram": self._longest}
        self._anchors = [length for length in _ANCHORS if length <= depth] or [depth]
        self._ends = np.array(self._anchors) - 1
        self._most_answers = config.suffix_decoding_max_cached_requests if keeps_answers else 0
        self._spec_factor = config.suffix_decoding_max_spec_factor
        self._min_share = config.suffix_decoding_min_token_prob
        size = 1 << bits if keeps_answers else 2
        self._mask, self._shift = size - 1, np.uint64(64 - bits)
        self._powers: _Numbers = np.multiply.accumulate(np.full(depth, _FACTOR | np.uint64(1), dtype=np.uint64))
        # np.zeros and np.empty: pages are touched when answers come.  Places are counted from 1 on: 0 is none.
        self._ring: IntArray = np.empty(size, dtype=np.int32)
        self._cache_keys: _Numbers = np.empty(size, dtype=np.uint64)
        self._heads: _Places = np.zeros((len(self._anchors), size), dtype=np.int64)
        self._links: _Places = np.empty((len(self._anchors), size), dtype=np.int64)
        self._starts: deque[int] = deque()
        self._ring[1], self._head = _GAP, 2

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> Iterable[Proposal]:
        if self._starts and len(tokens) >= self._anchors[-1]:
            yield from self._of_answers(_digest(sequence.group.cache_key), tokens[: -self._depth - 1 : -1], count)
        length, matched = len(tokens), 1
        found = ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        while matched < self._longest and len(ends):
            ends = ends[ends >= matched]
            ends = ends[tokens[ends - matched] == tokens[length - 1 - matched]]
            if len(ends):
                found, matched = ends, matched + 1
        if len(found) and matched >= self._shortest:
            end = int(found[-1])
            # A draft token that reaches the end of the text goes on with itself: the text repeats with this period.
            places = end + 1 + np.arange(count) % (length - 1 - end)
            yield Proposal(tokens[places], matched, "ngram")

    def _of_answers(self, cache_key: _Numbers, recent: IntArray, count: int) -> list[Proposal]:
        """The proposal, if there is one, from answers with ``cache_key`` in which ``recent`` (newest first) stands
        too."""
        slots = self._slots((recent.astype(np.uint64) * self._powers[: len(recent)]).cumsum()[self._ends], cache_key)
        last = recent[:2].tolist()
        for number in range(len(slots) - 1, -1, -1):
            places = self._places(number, int(slots[number]), last)
            if places and (found := self._follow(np.array(places), recent, cache_key, count)):
                return found
        return []

    def _slots(self, sums: _Numbers, cache_key: _Numbers) -> npt.NDArray[np.int64]:
        slots: npt.NDArray[np.int64] = ((sums ^ cache_key) * _FACTOR >> self._shift).astype(np.int64)
        return slots

    def _places(self, number: int, slot: int, last: list[int]) -> list[int]:
        """The last places of the anchor ``number`` with the hash of ``slot`` and the ``last`` two tokens, newest first,
        most of them with those before too."""
        mask, links = self._mask, self._links[number]
        oldest = max(self._starts[0], self._head - mask)  # matches and their cache keys end there at the latest
        token_at, places = self._ring.item, list[int]()
        place = self._heads.item(number, slot)
        for _ in range(_MOST_STEPS):
            if place < oldest or len(places) == _MOST_PLACES:
                break
            if token_at(place & mask) == last[0] and token_at(place - 1 & mask) == last[1]:
                places.append(place)
            place = links.item(place & mask)
        return places

    def _follow(self, places: _Places, recent: IntArray, cache_key: _Numbers, count: int) -> list[Proposal]:
        """What follows at those of ``places`` (n,), rising or not, that have most of ``recent`` (newest first)."""
        places = places[self._cache_keys[places & self._mask] == cache_key]
        if not len(places):
            return []
        before = self._ring[(places[:, None] - np.arange(len(recent))) & self._mask]
        matched = (before == recent).cumprod(axis=1).sum(axis=1)
        most = int(matched.max())
        count = min(count, int(self._spec_factor * most))
        if most < self._anchors[0] or count < 1:
            return []
        places = places[matched == most]
        behind = self._ring[(places[:, None] + np.arange(1, count + 1)) & self._mask]
        if len(places) == 1:
            path, length = behind[0], _length(behind[0] != _GAP)
        else:  # of each place, the share of all that go on alike up to each token
            shares = (behind[:, None] == behind).cumprod(axis=2).mean(axis=1) * (behind != _GAP).cumprod(axis=1)
            best = int(shares.sum(axis=1).argmax())
            path, length = behind[best], _length(shares[best] >= max(self._min_share, 1e-9))
        return [Proposal(path[:length].copy(), most, "suffix")] if length else []

    def learn(self, sequence: Sequence) -> None:
        first = sequence.num_prompt_tokens
        if (
            not self._most_answers or len(sequence.token_ids) <= first + 1
        ):  # one token teaches nothing, and may be that after a pooled prompt
            return
        text = sequence.token_ids[max(0, first - self._depth) :][-(self._mask >> 1) :]
        cache_key, start, end = _digest(sequence.group.cache_key), self._head, self._head + len(text)
        index = np.arange(start, end) & self._mask
        self._ring[index] = text
        self._cache_keys[index] = cache_key
        self._ring[end & self._mask] = _GAP
        self._head = end + 1
        self._starts.append(start)
        while len(self._starts) > self._most_answers or self._starts[0] <= self._head - self._mask:
            self._starts.popleft()
        self._index(text, start, cache_key)

    def _index(self, text: IntArray, start: int, cache_key: _Numbers) -> None:
        """Enter the places of ``text``, the first of which is ``start``, into the tables."""
        sums, numbers = np.zeros(len(text), dtype=np.uint64), text.astype(np.uint64)
        for back in range(min(self._anchors[-1], len(text))):  # as in ``propose``: token by token, newest first
            sums[back:] += numbers[: len(text) - back] * self._powers[back]
            if back + 1 in self._anchors:
                self._enter(self._anchors.index(back + 1), self._slots(sums[back:], cache_key), start + back)

    def _enter(self, number: int, slots: npt.NDArray[np.int64], first: int) -> None:
        """The places from ``first`` on have these ``slots`` (n,) of an anchor; each links to the one before it."""
        heads, order = self._heads[number], np.argsort(slots, kind="stable")
        chosen, places = slots[order], first + order
        before = heads[chosen]
        again = chosen[1:] == chosen[:-1]
        before[1:][again] = places[:-1][again]
        self._links[number, places & self._mask] = before
        heads[chosen] = places  # of equal slots numpy enters the last


def _length(holds: npt.NDArray[np.bool_]) -> int:
    """How many of ``holds`` (n,) are True before the first that is not."""
    return int(holds.argmin()) if not holds.all() else len(holds)


@lru_cache(maxsize=256)
def _digest(name: str) -> _Numbers:
    """A number of 64 bits (1,), for which a client cannot find a second text."""
    found: _Numbers = np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), dtype=np.uint64)
    return found
