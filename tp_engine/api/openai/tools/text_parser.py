"""Base of the parsers of generated text, which comes in pieces and becomes events as soon as they are certain.

A parser is in one state at a time, and a state is a method that reads: it takes what it understands off the pending
text, may name the next state, and returns False if it needs more text.  ``_read_text`` is the state outside of calls::

    feed(piece) -> _pending grows -> _state() reads, again and again, until it needs more text -> events
    _read_text --one of the opening marks--> _open(mark): the next state is that of a call, or of a block of them

``json_calls.py`` reads calls that are JSON objects, ``marked_calls.py`` calls whose arguments stand between marks.
Most formats only name their marks for one of the two; a format of another kind writes its states on this base.
"""

from collections.abc import Callable, Iterable, Sequence

from tp_engine.api.openai.tools.events import ChatEvent, EventSink, NewCallId, openai_call_id


class TextParser:
    """A ``ToolParser``.  White space beside a call is layout, and dropped unless text is on both sides.

    ``opens`` are the marks that end text; ``close`` ends a block of calls, empty for none.  Texts never show ``drops``.
    """

    def __init__(
        self,
        opens: Sequence[str],
        *,
        close: str = "",
        drops: Sequence[str] = (),
        new_call_id: NewCallId = openai_call_id,
    ) -> None:
        self._opens = tuple(opens)
        self._close = close
        self._drops = tuple(drops)
        self._ends = (*self._opens, *self._drops)
        self._first_characters = frozenset(mark[0] for mark in self._ends)
        self._sink = EventSink(new_call_id)
        self._state: Callable[[], bool] = self._read_text
        self._pending = ""  # not yet understood
        self._raw = ""  # text that is shown if it turns out to be no call
        self._space = ""  # white space at the end of the text so far
        self._has_text = False

    def feed(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text; returns the events that are certain now."""
        if not self._pending and self._first_characters.isdisjoint(text) and self._state == self._read_text:
            self._give(text)
            return self._sink.take()
        self._pending += text
        while self._pending and self._state():
            pass
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """End the text.  ``cut_off``: a limit ended it; drop half a mark at its end, instead of showing it."""
        if not cut_off:
            self._end()
        self._pending = self._raw = ""
        if not self._sink.num_calls:
            self._sink.content(self._space)
        self._space = ""
        return self._sink.take()

    def _end(self) -> None:
        """Give out what is pending, or finish an open call; the text has ended by itself."""
        if self._state == self._read_text:
            self._give(self._raw + self._pending)

    def _open(self, mark: str) -> None:
        """Name the next state: ``mark``, one of the opening marks, has been read."""
        raise NotImplementedError  # a parser with opening marks has it, forced calls have none

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

    def _read_text(self) -> bool:
        found = first_mark(self._pending, self._ends)
        place = len(self._pending) - partial_suffix(self._pending, *self._ends) if found is None else found[0]
        text, self._pending = self._pending[:place], self._pending[place:]
        self._give(text)
        if found is None:
            return False
        self._pending = self._pending[len(found[1]) :]
        if found[1] not in self._drops:
            self._open(found[1])
        return True

    def _read_junk(self) -> bool:
        """Drop text behind a broken call, up to the end of its block."""
        found = first_mark(self._pending, self._junk_ends)
        if found is None:
            self._pending = self._pending[len(self._pending) - partial_suffix(self._pending, *self._junk_ends) :]
            return False
        place, mark = found
        self._state, self._pending = self._read_text, self._pending[place + (len(mark) if mark == self._close else 0) :]
        return True

    @property
    def _junk_ends(self) -> tuple[str, ...]:
        return (self._close,)


def first_mark(text: str, marks: Iterable[str], start: int = 0) -> tuple[int, str] | None:
    """Return the place and the mark of the first of ``marks`` in ``text`` from ``start`` on; None if there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    return min(found, default=None)


def partial_suffix(text: str, *marks: str) -> int:
    """Length of the longest end of ``text`` with which one of ``marks`` begins, if it is not the whole mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(len(text), longest), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
