"""Tool calls as Hermes and Qwen models write them: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``.

::

    PROSE --<tool_call>--> BLOCK --{--> CALL --}--> BLOCK --</tool_call>--> PROSE
                             |            |
                             |            +-- broken once announced --> JUNK --</tool_call>--> PROSE
                             +-- anything else: not a call, shown as it is --> PROSE
"""

from __future__ import annotations

import enum

from tp_engine.api.openai.tools.call_reader import CallReader
from tp_engine.api.openai.tools.events import ChatEvent, EventSink, Prose, ToolFormat, partial_suffix

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
    """A ``ToolParser``.  A block without a call is content, with its markup, so that no text is lost."""

    def __init__(self) -> None:
        self._sink = EventSink()
        self._prose = Prose(self._sink)
        self._state = _State.PROSE
        self._pending = ""  # not yet understood
        self._raw = ""  # text since the block's beginning or its last call; shown if no call follows
        self._reader = CallReader(self._sink)

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if self._state is _State.PROSE and not self._pending and "<" not in text:
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
        before, marker, after = self._pending.partition(OPEN)
        if marker:
            self._prose.add(before)
            self._state, self._pending, self._raw = _State.BLOCK, after, OPEN
            return True
        held = partial_suffix(self._pending, OPEN)
        settled = len(self._pending) - held
        self._prose.add(self._pending[:settled])
        self._pending = self._pending[settled:]
        return False

    def _read_block(self) -> bool:
        """Between a block's objects."""
        char = self._pending[0]
        if char in _SEPARATORS:
            self._consume(char)
        elif char == "{":
            self._consume(char)
            self._state, self._reader = _State.CALL, CallReader(self._sink)
        elif self._pending.startswith((OPEN, CLOSE)):
            self._end_block()
        elif OPEN.startswith(self._pending) or CLOSE.startswith(self._pending):
            return False
        else:
            self._not_a_call()
        return True

    def _end_block(self) -> None:
        """At either mark: the closing one may be missing before the next block."""
        if self._pending.startswith(OPEN):
            self._pending, self._raw = self._pending[len(OPEN) :], OPEN
        else:
            self._pending, self._raw = self._pending[len(CLOSE) :], ""
            self._state = _State.PROSE

    def _read_call(self) -> bool:
        position = 0
        while position < len(self._pending):
            was_started = self._reader.started
            position += self._reader.push(self._pending, position)
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

    def _leave_broken_call(self) -> None:
        if self._reader.started:
            self._state, self._raw = _State.JUNK, ""
        else:
            self._not_a_call()

    def _skip_junk(self) -> bool:
        _, marker, after = self._pending.partition(CLOSE)
        if marker:
            self._state, self._pending = _State.PROSE, after
            return True
        self._pending = self._pending[len(self._pending) - partial_suffix(self._pending, CLOSE) :]
        return False

    def _not_a_call(self) -> None:
        """Show a block without a call; drop other text behind a call in its block."""
        if self._raw.startswith(OPEN):
            self._prose.add(self._raw)
            self._state = _State.PROSE
        else:
            self._state = _State.JUNK
        self._raw = ""

    def _consume(self, char: str) -> None:
        self._raw += char
        self._pending = self._pending[1:]


FORMAT = ToolFormat(models="Qwen, Hermes", marks=(OPEN,), new_parser=lambda tools: HermesToolParser())
