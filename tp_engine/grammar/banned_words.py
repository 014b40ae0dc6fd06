"""Words that a text must not have, whatever tokens they are cut into.

A word comes in three ways, and each is found before the token that completes it::

    in one token           " bad"  "\\nbad,"      never allowed
    in one longer word     "badge"  " embad"     allowed: another word, which is a token of its own
    over several tokens    "b" + "ad"            the second one is not allowed after the first

So a text never has the word between spaces, line ends or punctuation, and never assembles it from pieces.  All of this
works on bytes: a token may be a part of a character.
"""

from __future__ import annotations

import threading
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache

import numpy as np

from tp_engine.grammar.vocabulary import GrammarVocabulary
from tp_engine.plan import MASK_TOKENS, BoolArray, IntArray
from tp_engine.requests.request import EngineRequest

_MAX_REMEMBERED = 16
_MAX_PLACES = 256  # whose completing tokens are remembered


class TokenSpellings:
    """What each token writes; ``special_ids`` are tokens that texts may leave out.

    ``bytes`` are those of all tokens, one after the other, and a *place* is an offset in them.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int] = ()) -> None:
        self.tokens = tokens
        self.special_ids = frozenset(special_ids)
        self.bytes = b"".join(tokens)

    @classmethod
    def of(cls, vocabulary: GrammarVocabulary) -> TokenSpellings:
        """The spellings of a model's vocabulary; takes less than a second for 150,000 tokens, tables included."""
        library, ids = vocabulary.tokens, range(min(vocabulary.tokens.vocab_size, vocabulary.num_words * MASK_TOKENS))
        return cls([library.decode_bytes([one]) for one in ids], [one for one in ids if library.is_special_token(one)])

    def beginning_with(self, start: bytes) -> IntArray:
        """The tokens whose spelling begins with ``start``."""
        first = bisect_left(self._sorted, start, key=self.tokens.__getitem__)
        end = bisect_right(self._sorted, start, lo=first, key=lambda token: self.tokens[token][: len(start)])
        return np.sort(np.array(self._sorted[first:end], dtype=np.int32))

    def writing(self, word: str) -> IntArray:
        """The tokens that have ``word`` in them, but not as a part of a longer word."""
        first = self._places(word.encode())
        last = first + len(word.encode())
        owners = self._owners[first]
        is_longer: BoolArray = np.zeros(len(first), dtype=np.bool_)
        if _is_of_word(word[0]):
            is_longer |= (first > self._ends[owners] - self._lengths[owners]) & self._is_of_word[first - 1]
        if _is_of_word(word[-1]):
            is_longer |= (last < self._ends[owners]) & self._is_of_word[np.minimum(last, len(self.bytes) - 1)]
        return np.unique(owners[~is_longer])

    def _places(self, data: bytes) -> IntArray:
        """The places where tokens have ``data``."""
        text = np.frombuffer(self.bytes, dtype=np.uint8)
        found = np.flatnonzero(text[: max(0, len(text) - len(data) + 1)] == data[0])
        for number, byte in enumerate(data[1:], start=1):
            found = found[text[found + number] == byte]
        return found[found + len(data) <= self._limits[found]].astype(np.int32)

    @cached_property
    def _sorted(self) -> list[int]:
        """The tokens in the order of their spellings."""
        return sorted(range(len(self.tokens)), key=self.tokens.__getitem__)

    @cached_property
    def _lengths(self) -> IntArray:
        return np.array([len(token) for token in self.tokens], dtype=np.int32)

    @cached_property
    def _ends(self) -> IntArray:
        return np.cumsum(self._lengths, dtype=np.int32)

    @cached_property
    def _owners(self) -> IntArray:
        """The token of each place."""
        return np.repeat(np.arange(len(self.tokens), dtype=np.int32), self._lengths)

    @cached_property
    def _limits(self) -> IntArray:
        """The end of the token of each place."""
        return np.repeat(self._ends, self._lengths)

    @cached_property
    def _is_of_word(self) -> BoolArray:
        """Whether each byte belongs to a letter or the like; not if its token has only a part of the character."""
        of_ascii = np.array([_is_of_word(chr(byte)) and byte < 128 for byte in range(256)])
        found: BoolArray = of_ascii[np.frombuffer(self.bytes, dtype=np.uint8)]
        for token, end in zip(self.tokens, self._ends.tolist(), strict=True):
            place = end - len(token)
            for char in () if token.isascii() else token.decode(errors="surrogateescape"):
                size = len(char.encode(errors="surrogateescape"))
                found[place : place + size] = _is_of_word(char)
                place += size
        return found


def _is_of_word(char: str) -> bool:
    return char.isalnum() or char == "_" or bool(unicodedata.combining(char))


class WordRulesMaker:
    """Makes the rules of requests' words, and remembers the last ones; thread-safe.

    Without a ``vocabulary`` spellings are unknown: only the tokens that the tokenizer itself makes of a word, alone and
    after a space, are banned.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._spelled = lru_cache(maxsize=_MAX_REMEMBERED)(
            lambda words, shows_special: SpelledWords(words, self._spellings, shows_special=shows_special)
        )
        self._lock = threading.Lock()

    def rules(self, request: EngineRequest, banned: tuple[tuple[int, ...], ...]) -> SpelledWords | TokenWords:
        """The rules of ``request``, whose words the tokenizer writes as ``banned``; with words this takes up to a
        second, and a second more at the first call."""
        if self._vocabulary is None or not banned:
            return TokenWords(banned)
        with self._lock:
            return self._spelled(tuple(request.params.bad_words), not request.params.skip_special_tokens)

    @cached_property
    def _spellings(self) -> TokenSpellings:
        assert self._vocabulary is not None
        return TokenSpellings.of(self._vocabulary)


class TokenWords:
    """A request's words as token ids, for unknown spellings; implements ``WordRules``.  A place is a text's last
    tokens."""

    start: tuple[int, ...] = ()

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.never: IntArray = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int32)
        self._longer = [(tuple(word[:-1]), np.array(word[-1:], dtype=np.int32)) for word in words if len(word) > 1]
        self._kept = max((len(before) for before, _ in self._longer), default=0)

    def after(self, place: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """The place after one more token."""
        return (*place, token_id)[-self._kept :] if self._kept else ()

    def completing(self, place: tuple[int, ...]) -> list[IntArray]:
        """Return the tokens that would complete a word which has begun."""
        return [last for before, last in self._longer if place[-len(before) :] == before]


class SpelledWords:
    """A request's words in terms of its vocabulary; implements ``WordRules``.

    A place is the longest end of the text with which a word begins, as its node in the trie of all beginnings (Aho and
    Corasick), in which ``_shorter`` leads to the next shorter such end.  So a token costs a step for each of its bytes,
    however many words begin alike.
    """

    start = 0

    def __init__(self, words: Sequence[str], spellings: TokenSpellings, *, shows_special: bool) -> None:
        own = {word.lstrip() for word in words}
        self.never: IntArray = np.unique(np.concatenate([spellings.writing(word) for word in own]))
        self._spellings = spellings
        self._unseen = frozenset() if shows_special else spellings.special_ids
        self._next: list[dict[int, int]] = [{}]  # for each beginning: byte -> the beginning that is longer by it
        rests: list[set[bytes]] = [set()]  # what may be missing after each
        for data in sorted(word.encode() for word in own):
            node = 0
            for place, byte in enumerate(data[:-1], start=1):
                if byte not in self._next[node]:
                    self._next[node][byte] = len(self._next)
                    self._next.append({})
                    rests.append(set())
                node = self._next[node][byte]
                rests[node].add(data[place:])
        self._shorter = self._shorter_ends()
        tokens = {rest: spellings.beginning_with(rest) for rest in set().union(*rests)}
        self._own = [_union([tokens[rest] for rest in each]) for each in rests]
        self._completing = lru_cache(maxsize=_MAX_PLACES)(self._completing_at)

    def after(self, place: int, token_id: int) -> int:
        """The place after one more token."""
        if token_id not in self._unseen:
            for byte in self._spellings.tokens[token_id]:
                place = self._step(place, byte)
        return place

    def completing(self, place: int) -> list[IntArray]:
        """Return the tokens that would complete a word which has begun."""
        return [self._completing(place)]

    def _step(self, node: int, byte: int) -> int:
        while node and byte not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(byte, 0)

    def _shorter_ends(self) -> list[int]:
        shorter = self._shorter = [0] * len(self._next)
        level = list(self._next[0].values())
        while level:
            for node in level:
                for byte, child in self._next[node].items():
                    shorter[child] = self._step(shorter[node], byte)
            level = [child for node in level for child in self._next[node].values()]
        return shorter

    def _completing_at(self, node: int) -> IntArray:
        found = []
        while node:
            found.append(self._own[node])
            node = self._shorter[node]
        return _union(found)


def _union(parts: Sequence[IntArray]) -> IntArray:
    """The token ids of all parts, each once."""
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return some[0] if some else np.empty(0, dtype=np.int32)
    return np.unique(np.concatenate(some))
