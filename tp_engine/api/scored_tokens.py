"""Log-probabilities of successive tokens, kept as the engine's arrays.

A prompt of 1,000 tokens with 20 alternatives has 21,000 of them: an object for each takes longer to make than the
prompt takes to compute.  So nothing is made before somebody reads it, and answers are made from ``ScoredPosition``,
which has a list for each position::

    TokenLogprobs, arrays (n, 1 + k) --+-- scored() ----> ScoredPosition, likeliest first -----> JSON
                                       +-- [i], iter ---> {token id: Logprob}, chosen first ---> who reads the output
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, overload

from tp_engine.engine.token_texts import TokenTexts, name_of
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.plan import TokenLogprobs
from tp_engine.requests.outputs import Logprob

Position: TypeAlias = dict[int, Logprob]
"""Of one token: the chosen one first, then the likeliest."""
_Entry = TypeVar("_Entry", Position, "Position | None")


class Texts(Protocol):
    """The texts of the tokens of one position."""

    def of(self, token_id: int) -> tuple[str, bytes]:
        """The text that a token adds, and its own bytes."""

    def texts(self, token_ids: Sequence[int]) -> Sequence[str | None]:
        """What each adds to the text; None if it was not decoded."""

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Names that differ from those of most other tokens."""


class ScoredPosition(NamedTuple):
    """The scored tokens of one position, the likeliest first, each once; the actual one is at place ``chosen``, and
    adds ``text``.  ``texts`` is None if tokens are not decoded; it moves on with the next position."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: Sequence[int | None]
    chosen: int
    text: str
    texts: Texts | None


class _MadeWhenRead(Sequence[_Entry]):
    """A list whose entries are made when they are first read."""

    @abstractmethod
    def _entry(self, place: int) -> _Entry:
        """Make the entry at ``place``, from 0 on, or return what was made before."""

    @overload
    def __getitem__(self, place: int) -> _Entry: ...
    @overload
    def __getitem__(self, place: slice) -> list[_Entry]: ...
    def __getitem__(self, place: int | slice) -> _Entry | list[_Entry]:
        places = range(len(self))[place]
        return self._entry(places) if isinstance(places, int) else list(map(self._entry, places))

    def __iter__(self) -> Iterator[_Entry]:
        return map(self._entry, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return repr(list(self))


class ScoredRun:
    """The scored tokens of one sequence, which grow; ``texts`` is at the first."""

    def __init__(self, num_alternatives: int, texts: TokenTexts | None) -> None:
        self._columns, self._begin = slice(1 + num_alternatives), texts
        self._parts: list[tuple[TokenLogprobs, int]] = []
        self._made: list[Position] = []
        self._making, self._lock = self._from_begin(), threading.Lock()
        self._stopped: tuple[int, Iterator[ScoredPosition]] | None = None
        self.length = 0

    def add(self, part: TokenLogprobs, num_positions: int) -> None:
        """Add the first ``num_positions`` of ``part`` after what is there."""
        self._parts.append((part, num_positions))
        self.length += num_positions

    def scored(self, start: int, stop: int) -> Iterator[ScoredPosition]:
        """Make these positions.  Texts depend on earlier tokens, so a reader of a stream continues where it stopped."""
        with self._lock:
            stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped[0] == start:
            positions = stopped[1]
        else:
            positions = self._from_begin()
            for _ in range(start):
                next(positions)
        yield from islice(positions, stop - start)
        self._stopped = stop, positions

    def position(self, place: int) -> Position:
        """One as a mapping, which is made once."""
        if place >= len(self._made):
            with self._lock:
                while len(self._made) <= place:
                    self._made.append(_as_mapping(next(self._making)))
        return self._made[place]

    def _from_begin(self) -> Iterator[ScoredPosition]:
        """Make one after the other, including those that are added meanwhile."""
        texts = None if self._begin is None else self._begin.copy()
        for part, num_positions in self._parts:
            for token_ids, logprobs, rank in zip(
                part.token_ids[:num_positions, self._columns].tolist(),
                part.logprobs[:num_positions, self._columns].tolist(),
                part.ranks[:num_positions].tolist(),
                strict=True,
            ):
                yield _in_order(token_ids, logprobs, rank, texts)
                if texts is not None:
                    texts.take(token_ids[0])


class ScoredTokens(_MadeWhenRead[Position]):
    """The positions of a run from ``start`` on that it has now, as a list of mappings."""

    def __init__(self, run: ScoredRun, start: int = 0) -> None:
        self._run, self._start, self._stop = run, start, run.length
        self._texts: list[str] = []

    def __len__(self) -> int:
        return self._stop - self._start

    def append(self, later: ScoredTokens) -> None:
        """Add what follows in the same run."""
        assert later._run is self._run and later._start == self._stop, "updates come in order"
        self._stop = later._stop

    def scored(self) -> Iterator[ScoredPosition]:
        texts = []
        for position in self._run.scored(self._start, self._stop):
            texts.append(position.text)
            yield position
        self._texts = texts

    def texts(self) -> list[str]:
        """The text that each of the actual tokens adds; cheaper after ``scored``, which also finds it."""
        if len(self._texts) < len(self):
            self._texts = [position.text for position in self.scored()]
        return self._texts

    def _entry(self, place: int) -> Position:
        return self._run.position(self._start + place)


class PromptLogprobs(_MadeWhenRead["Position | None"]):
    """Those of a prompt, with None for its first token."""

    def __init__(
        self,
        parts: Iterable[TokenLogprobs],
        prompt_token_ids: Sequence[int],
        num_alternatives: int,
        decoder: TokenDecoder | None,
    ) -> None:
        self._length = len(prompt_token_ids)
        texts = None if decoder is None else TokenTexts(decoder)
        if texts is not None:
            texts.take(prompt_token_ids[0])
        self._run = ScoredRun(num_alternatives, texts)
        for part in parts:
            self._run.add(part, min(len(part.ranks), self._length - 1 - self._run.length))

    def __len__(self) -> int:
        return self._length

    def scored(self) -> Iterator[ScoredPosition | None]:
        yield None
        yield from self._run.scored(0, self._run.length)

    def _entry(self, place: int) -> Position | None:
        return self._run.position(place - 1) if place else None


def scored_positions(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None]
) -> Iterator[ScoredPosition | None]:
    """Go through the positions of ``token_ids``, whichever form they have; None for a token without one."""
    if isinstance(positions, (ScoredTokens, PromptLogprobs)):
        return iter(positions.scored())
    return (_of_mapping(*pair) for pair in zip(token_ids, positions, strict=True))


def _in_order(token_ids: list[int], logprobs: list[float], rank: int, texts: TokenTexts | None) -> ScoredPosition:
    """Move the chosen token from the first place to its own among the others, which are in order; of equal ones it is
    the first.  It may be one of them, too."""
    chosen, logprob = token_ids[0], logprobs[0]
    place = min(rank, len(token_ids))
    behind = token_ids[place:]
    ranks = [*range(1, place), rank, *range(place, len(token_ids))]
    token_ids = [*token_ids[1:place], chosen, *behind]
    logprobs = [*logprobs[1:place], logprob, *logprobs[place:]]
    if chosen in behind:
        twin = place + behind.index(chosen)
        del token_ids[twin], logprobs[twin], ranks[twin]
    text = id_text(chosen) if texts is None else texts.of(chosen)[0]
    return ScoredPosition(token_ids, logprobs, ranks, place - 1, text, texts)


def _as_mapping(position: ScoredPosition) -> Position:
    token_ids, logprobs, ranks, chosen, _, texts = position
    made: Position = {token_ids[chosen]: None}  # type: ignore[dict-item]  # it comes first
    for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
        text, data = (None, None) if texts is None else texts.of(token_id)
        made[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=text, token_bytes=data)
    return made


def _of_mapping(token_id: int, position: Mapping[int, Logprob] | None) -> ScoredPosition | None:
    if position is None:
        return None
    token_ids = sorted(position, key=lambda other: -position[other].logprob)
    entries, texts = [position[other] for other in token_ids], _KnownTexts(position)
    return ScoredPosition(
        token_ids,
        [entry.logprob for entry in entries],
        [entry.rank for entry in entries],
        token_ids.index(token_id),
        texts.of(token_id)[0],
        texts,
    )


class _KnownTexts:
    """Those that a position's entries have; a token without one is named by its id."""

    def __init__(self, position: Mapping[int, Logprob]) -> None:
        self._position = position

    def of(self, token_id: int) -> tuple[str, bytes]:
        entry = self._position[token_id]
        text = id_text(token_id) if entry.decoded_token is None else entry.decoded_token
        return text, text.encode() if entry.token_bytes is None else entry.token_bytes

    def texts(self, token_ids: Sequence[int]) -> list[str | None]:
        return [self._position[token_id].decoded_token for token_id in token_ids]

    def names(self, token_ids: Sequence[int]) -> list[str]:
        return [name_of(self.of(token_id)[1]) for token_id in token_ids]


def id_text(token_id: int) -> str:
    """The name of a token whose text is unknown or not wanted."""
    return f"token_id:{token_id}"
