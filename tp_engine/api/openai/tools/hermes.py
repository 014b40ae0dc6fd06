"""Tool calls as Hermes and Qwen models write them: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``.

::

    PROSE --<tool_call>--> BLOCK --{--> CALL --}--> BLOCK --</tool_call>--> PROSE
                             |            |
                             |            +-- broken once announced --> JUNK --</tool_call>--> PROSE
                             +-- anything else: not a call, shown as it is --> PROSE
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tp_engine.api.openai.tools.call_reader import CallReader
from tp_engine.api.openai.tools.events import (
    ChatEvent,
    EventSink,
    Prose,
    ToolFormat,
    first_mark,
    openai_call_id,
    partial_suffix,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
# Between the objects of one block; some models write a list.
_SEPARATORS = " \t\r\n,[]"


class _State(enum.Enum):
    PROSE = enum.auto()
    BLOCK = enum.auto()
    CALL = enum.auto()
    JUNK = enum.auto()


class HermesToolParser:
    """A ``ToolParser``.  A block without a call is content, with its markup, so that no text is lost.

    One of ``opens`` begins a block.  ``closes``: a block ends with ``CLOSE`` only; otherwise any text ends it, too.
    """

    def __init__(
        self,
        opens: tuple[str, ...] = (OPEN,),
        *,
        closes: bool = True,
        new_call_id: Callable[[], str] = openai_call_id,
    ) -> None:
        self._opens = opens
        self._closes = closes
        self._first_characters = frozenset(mark[0] for mark in opens)
        self._sink = EventSink(new_call_id)
        self._prose = Prose(self._sink)
        self._state = _State.PROSE
        self._pending = ""  # not yet understood
        self._raw = ""  # text since the block's beginning or its last call; shown if no call follows
        self._reader = CallReader(self._sink)

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if self._state is _State.PROSE and not self._pending and self._first_characters.isdisjoint(text):
            self._prose.add(text)
            return self._sink.take()
        self._pending += text
        while self._pending and self._step():
            pass
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        unannounced = self._state is _State.CALL and not self._reader.started
        if not cut_off and (unannounced or self._state is _State.PROSE):
            self._prose.add(self._raw + self._pending)
        self._pending = self._raw = ""
        self._prose.finish()
        return self._sink.take()

    def _step(self) -> bool:
        """Read some of the pending text; False if that needs more text."""
        match self._state:
            case _State.PROSE:
                return self._read_prose()
            case _State.BLOCK:
                return self._read_block()
            case _State.CALL:
                return self._read_call()
            case _State.JUNK:
                return self._skip_junk()

    def _read_prose(self) -> bool:
        mark, self._pending = self._prose.add_until(self._pending, self._opens)
        if mark is None:
            return False
        self._state, self._raw = _State.BLOCK, mark
        return True

    def _read_block(self) -> bool:
        """Between a block's objects."""
        char, marks = self._pending[0], (CLOSE, *self._opens)
        if self._pending.startswith(marks):
            self._end_block()
        elif any(mark.startswith(self._pending) for mark in marks):
            return False
        elif char in _SEPARATORS:
            self._consume(char)
        elif char == "{":
            self._consume(char)
            self._begin_call()
        else:
            self._not_a_call()
        return True

    def _end_block(self) -> None:
        """At either mark: the closing one may be missing before the next block."""
        mark = next((one for one in self._opens if self._pending.startswith(one)), "")
        self._pending, self._raw = self._pending[len(mark or CLOSE) :], mark
        if not mark:
            self._state = _State.PROSE

    def _begin_call(self) -> None:
        self._state, self._reader = _State.CALL, CallReader(self._sink)

    def _read_call(self) -> bool:
        position = 0
        while position < len(self._pending):
            was_started = self._reader.started
            position += self._push(position)
            if self._reader.started and not was_started:
                self._prose.note_call()
            if self._reader.broken:
                self._raw += self._pending[:position]
                self._pending = self._pending[position:]
                self._leave_broken_call()
                return True
            if self._reader.done:
                self._state, self._raw = _State.BLOCK, ""
                self._pending = self._pending[position:]
                return True
        self._raw += "" if self._reader.started else self._pending
        self._pending = ""
        return False

    def _push(self, position: int) -> int:
        """Let the reader read at ``position`` of the pending text; returns the number of characters."""
        return self._reader.push(self._pending, position)

    def _leave_broken_call(self) -> None:
        if self._reader.started:
            self._state, self._raw = _State.JUNK, ""
        else:
            self._not_a_call()

    def _skip_junk(self) -> bool:
        marks = (CLOSE,) if self._closes else (CLOSE, *self._opens)
        found = first_mark(self._pending, marks)
        if found is not None:
            place, mark = found
            self._state, self._pending = _State.PROSE, self._pending[place + (len(CLOSE) if mark == CLOSE else 0) :]
            return True
        self._pending = self._pending[len(self._pending) - partial_suffix(self._pending, *marks) :]
        return False

    def _not_a_call(self) -> None:
        """Show a block without a call; drop other text behind a call in its block."""
        if self._raw.startswith(self._opens):
            self._prose.add(self._raw)
            self._state = _State.PROSE
        elif not self._closes:
            self._prose.add(self._raw[len(self._raw.rstrip()) :])
            self._state = _State.PROSE
        else:
            self._state = _State.JUNK
        self._raw = ""

    def _consume(self, char: str) -> None:
        self._raw += char
        self._pending = self._pending[1:]


FORMAT = ToolFormat(models="Qwen, Hermes", marks=(OPEN,), opens=(OPEN,), new_parser=lambda tools: HermesToolParser())
