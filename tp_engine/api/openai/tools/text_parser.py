"""Base of the parsers of generated text, which comes in pieces and becomes events as soon as they are certain.

A parser is a generator that reads the pending text in order, and yields where it needs more.  So its states are places
in ordinary code, with loops and local variables::

    feed(piece) -> _pending grows -> _reading continues up to the next yield (_more) -> events
    _read:  text up to an opening mark (_read_text) -> a block of calls (_read_block) -> text -> ...

What may turn out to be no call stays pending, and ``_at`` is the place up to which it has been read.  ``json_calls.py``
reads calls that are JSON objects, ``marked_calls.py`` calls whose arguments stand between marks, and
``literal_calls.py`` calls as in a program.  Most formats only name their marks for one of them.
"""

import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias, TypeVar

from tp_engine.api.openai.tools.events import (
    CallArguments,
    CallStarted,
    ChatEvent,
    ContentText,
    NewCallId,
    ReasoningText,
    openai_call_id,
)

TextEvent: TypeAlias = ContentText | ReasoningText | CallArguments
_Found = TypeVar("_Found")
# A reader of pending text, which yields where it needs more.
Reading: TypeAlias = Generator[None, None, _Found]
# Pending text is read repeatedly, and copied with each mark, so a long text is read in pieces.
_PIECE = 4096
WHITE_SPACE, NO_SPACE = re.compile(r"\s*"), re.compile("")


class EndOfTextError(Exception):
    """The text has ended by itself where more was needed."""


class NoCallError(Exception):
    """What looked like a call is not one, or no longer is."""


class EventSink:
    """Collects the events of one ``feed`` and joins neighbouring pieces of the same kind."""

    def __init__(self, new_call_id: NewCallId = openai_call_id) -> None:
        self._new_call_id = new_call_id
        self._events: list[ChatEvent] = []
        self._last: TextEvent | None = None  # the first of the pieces that are not yet joined
        self._pieces: list[str] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self.add(ContentText(text))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        self.add(ReasoningText(text))

    def start_call(self, name: str) -> None:
        """Begin the next call."""
        self.add(CallStarted(self.num_calls, self._new_call_id(name), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self.add(CallArguments(self.num_calls - 1, text))

    def add(self, event: ChatEvent) -> None:
        """Add an event."""
        if isinstance(event, CallStarted):
            self._join()
            self._events.append(event)
        elif event.text:
            if not isinstance(event, type(self._last)):
                self._join()
                self._last = event
            self._pieces.append(event.text)

    def take(self) -> list[ChatEvent]:
        """Remove and return the events so far."""
        self._join()
        given, self._events = self._events, []
        return given

    def _join(self) -> None:
        if self._last is not None:
            self._events.append(replace(self._last, text="".join(self._pieces)))
            self._last, self._pieces = None, []


class TextParser:
    """The parser of one sequence; its joined events are the same for every split of the text.

    White space beside a call is layout, and dropped unless text is on both sides.

    ``opens`` are the marks that end text.  Texts never show ``drops``.
    """

    def __init__(
        self, opens: Sequence[str], *, drops: Sequence[str] = (), new_call_id: NewCallId = openai_call_id
    ) -> None:
        self._opens = tuple(opens)
        self._ends = (*self._opens, *drops)
        self._first_characters = frozenset(mark[0] for mark in self._ends)
        self._sink = EventSink(new_call_id)
        self._pending = ""
        self._at = 0
        self._is_unsure = False  # what has been read is shown if it turns out to be no call
        self._in_text = False
        self._has_ended = False
        self._space = ""  # white space at the end of the text so far
        self._has_text = False
        self._reading = self._read()

    def feed(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text; returns the events that are certain now."""
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            if self._in_text and not self._pending and self._first_characters.isdisjoint(piece):
                self._give(piece)
            else:
                self._pending += piece
                next(self._reading)
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """End the text.  ``cut_off``: a limit ended it; drop half a mark at its end, instead of showing it."""
        if not cut_off:
            self._has_ended = True
            with suppress(EndOfTextError):
                next(self._reading)
        if not self._sink.num_calls:
            self._sink.content(self._space)
        return self._sink.take()

    def _read(self) -> Reading[None]:
        """Read the whole text."""
        while True:
            mark = yield from self._read_text()
            yield from self._read_block(mark)

    def _read_block(self, mark: str) -> Reading[None]:
        """Read calls from ``mark`` on, one of the opening marks, with which the pending text begins."""
        raise NotImplementedError  # a parser with opening marks has it

    def _read_text(self) -> Reading[str]:
        """Pass on text up to an opening mark, and return that mark, which is still pending."""
        while True:
            found = first_mark(self._pending, self._ends)
            self._give(self._take(num_settled(self._pending, self._ends) if found is None else found[0]))
            if found is None:
                self._in_text = True
                try:
                    yield from self._more()
                except EndOfTextError:
                    self._give(self._pending)
                    raise
                self._in_text = False
            elif found[1] in self._opens:
                return found[1]
            else:
                self._take(len(found[1]))

    def _give(self, text: str) -> None:
        """Pass on text outside of calls; white space at its end waits for what follows."""
        solid = text.rstrip()
        if not solid:
            self._space += text
            return
        whole = self._space + solid
        self._sink.content(whole.lstrip() if self._sink.num_calls and not self._has_text else whole)
        self._space = text[len(solid) :]
        self._has_text = True

    def _take(self, size: int) -> str:
        """Take the first ``size`` characters off the pending text."""
        text, self._pending, self._at = self._pending[:size], self._pending[size:], 0
        return text

    def _more(self) -> Reading[None]:
        """Wait for more text.  Raises ``EndOfTextError``."""
        if self._has_ended:
            raise EndOfTextError
        if not self._is_unsure:
            self._take(self._at)
        yield

    def _next(self, space: re.Pattern[str] = WHITE_SPACE) -> Reading[str]:
        """Skip white space, and return the character after it."""
        while True:
            found = space.match(self._pending, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._pending):
                return self._pending[self._at]
            yield from self._more()

    def _mark(self, *marks: str, space: re.Pattern[str] = WHITE_SPACE) -> Reading[str]:
        """Skip white space and one of ``marks``, and return that; empty if other text follows."""
        while True:
            yield from self._next(space)
            found = next((mark for mark in marks if self._pending.startswith(mark, self._at)), "")
            if not self._may_begin(marks, self._at):  # or one that is longer
                self._at += len(found)
                return found
            yield from self._more()

    def _may_begin(self, marks: Iterable[str], place: int) -> bool:
        """Whether the pending text ends in one of ``marks`` that begins at ``place``."""
        return any(len(mark) > len(self._pending) - place and mark.startswith(self._pending[place:]) for mark in marks)

    def _up_to(self, marks: Sequence[str], limit: int | None = None) -> Reading[tuple[str, str] | None]:
        """Skip text and the first of ``marks``, and return both; None, and skip nothing, beyond ``limit``."""
        seen = self._at
        while True:
            found = first_mark(self._pending, marks, seen)
            seen = max(seen, num_settled(self._pending, marks)) if found is None else found[0]
            if limit is not None and seen - self._at > limit:
                return None
            if found is not None:
                text, self._at = self._pending[self._at : seen], seen + len(found[1])
                return text, found[1]
            waits_at = self._at
            yield from self._more()
            seen -= waits_at - self._at

    def _skip(self, close: str, *others: str) -> Reading[None]:
        """Drop text after a broken call up to a mark, and the mark if it is ``close``."""
        self._is_unsure = False
        while (found := first_mark(self._pending, (close, *others), self._at)) is None:
            self._at = max(self._at, num_settled(self._pending, (close, *others)))
            yield from self._more()
        self._take(found[0] + (len(close) if found[1] == close else 0))


class MessageParser(TextParser):
    """A parser of whole messages, which also finds the reasoning.

    ``has_reasoning``: the text is known to begin with reasoning.  ``in_answer``: that has ended, or there is none; None
    while a call may have ended it.  ``num_reasoning_characters``: its length, with its marks, if a call has ended it.
    """

    has_reasoning = False
    in_answer: bool | None = False
    num_reasoning_characters: int | None = None


def first_mark(text: str, marks: Iterable[str], start: int = 0) -> tuple[int, str] | None:
    """The place and the mark of the first of ``marks`` in ``text`` from ``start`` on; None if there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    return min(found, default=None)


def partial_suffix(text: str, *marks: str) -> int:
    """Length of the longest end of ``text`` with which one of ``marks`` begins, if it is not the whole mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(len(text), longest), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def num_settled(text: str, marks: Sequence[str]) -> int:
    """How many characters of ``text``, which has none of ``marks``, surely belong to none."""
    return len(text) - partial_suffix(text, *marks)


def valid_unicode(text: str) -> str:
    """``text`` with U+FFFD for half a surrogate pair, which no encoding can write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
