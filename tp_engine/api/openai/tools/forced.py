"""Tool calls that the request forces: a constraint of the engine makes the text JSON, without markup."""

from __future__ import annotations

from collections.abc import Callable

from tp_engine.api.openai.tools.call_reader import CallReader
from tp_engine.api.openai.tools.events import ChatEvent, EventSink, openai_call_id

_SEPARATORS = " \t\r\n,[]"


class CallListParser:
    """A ``ToolParser`` for ``tool_choice: required``: the text is ``[{"name": "f", "parameters": {...}}, ...]``.

    Other text, which only a model without the constraint can write, is content.
    """

    def __init__(self, new_call_id: Callable[[], str] = openai_call_id) -> None:
        self._sink = EventSink(new_call_id)
        self._reader: CallReader | None = None
        self._raw = ""  # text that may turn out to be content
        self._is_content = False

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        position = 0
        while position < len(text):
            if self._is_content:
                self._sink.content(text[position:])
                break
            position += self._push(text, position)
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if not cut_off and self._sink.num_calls == 0:
            self._sink.content(self._raw)
        self._raw = ""
        return self._sink.take()

    def _push(self, text: str, position: int) -> int:
        """Read what begins at ``position``; returns the number of characters."""
        char, size = text[position], 1
        if self._reader is None:
            self._keep(char)
            if char == "{":
                self._reader = CallReader(self._sink)
            elif char not in _SEPARATORS:
                self._take_as_content(char)
            return size
        size = self._reader.push(text, position)
        self._keep(text[position : position + size])
        if self._reader.broken:
            self._take_as_content("")
        elif self._reader.done:
            self._reader = None
        return size

    def _keep(self, text: str) -> None:
        """Remember text that may turn out to be content."""
        if self._sink.num_calls == 0:
            self._raw += text

    def _take_as_content(self, char: str) -> None:
        self._is_content = True
        self._sink.content(self._raw if self._sink.num_calls == 0 else char)
        self._raw = ""


class NamedCallParser:
    """A ``ToolParser`` for a ``tool_choice`` that names a function: the text is its arguments."""

    def __init__(self, name: str, new_call_id: Callable[[], str] = openai_call_id) -> None:
        self._name = name
        self._sink = EventSink(new_call_id)
        self._index: int | None = None

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if self._index is None:
            text = text.lstrip()
            if not text:
                return []
            self._index = self._sink.start_call(self._name)
        self._sink.arguments(self._index, text)
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        return []
