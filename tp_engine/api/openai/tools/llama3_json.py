"""Tool calls as Llama 3 models write them: ``{"name": "f", "parameters": {...}}``, several separated by ``;``.

``<|python_tag|>`` may precede a call and is never shown.  Without it an object is a call only if it begins with the
name of one of the request's tools; other braces are content.
"""

from __future__ import annotations

from tp_engine.api.openai.tools.call_reader import CallReader
from tp_engine.api.openai.tools.events import ChatEvent, EventSink, Prose, ToolFormat, partial_suffix

PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,"


class Llama3JsonToolParser:
    """A ``ToolParser``; ``names`` are the tools of the request."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._sink = EventSink()
        self._prose = Prose(self._sink)
        self._pending = ""
        self._raw = ""  # text of an object that is not known to be a call
        self._reader: CallReader | None = None
        self._between_calls = False
        self._tagged = False  # a call must follow

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        waits = self._reader is not None or self._pending or self._between_calls or self._tagged
        if not waits and "<" not in text and "{" not in text:
            self._prose.add(text)
            return self._sink.take()
        self._pending += text
        while self._pending and (self._read_call() if self._reader else self._read_prose()):
            pass
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if self._between_calls and not self._pending.strip(_SEPARATORS):
            self._pending = ""
        if not cut_off and (self._reader is None or not self._reader.started):
            self._prose.add(self._raw + self._pending)
        self._pending = self._raw = ""
        self._prose.finish()
        return self._sink.take()

    def _read_prose(self) -> bool:
        """Read up to the next possible call; False if all pending text may be its beginning."""
        if self._between_calls and not self._pass_separators():
            return False
        before, tag, after = self._pending.partition(PYTHON_TAG)
        text, brace, _ = before.partition("{")
        if brace:
            self._prose.add(text)
            self._begin_call(text, self._pending[len(text) + 1 :])
            return True
        if tag:
            self._prose.add(before)
            self._pending, self._tagged = after, True
            return True
        settled = len(before) - partial_suffix(before, PYTHON_TAG)
        self._prose.add(before[:settled])
        self._tagged &= not before[:settled].strip()
        self._pending = before[settled:]
        return False

    def _pass_separators(self) -> bool:
        """Drop separators if another call follows; False if that is not known yet."""
        rest = self._pending.lstrip(_SEPARATORS)
        if not rest or (PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG):
            return False
        if rest.startswith(("{", PYTHON_TAG)):
            self._pending = rest
        self._between_calls = False
        return True

    def _begin_call(self, before: str, rest: str) -> None:
        names = None if self._tagged and not before.strip() else self._names
        self._reader, self._raw, self._pending = CallReader(self._sink, names, checks_arguments=True), "{", rest
        self._tagged = False

    def _read_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        position = 0
        while position < len(self._pending):
            was_started = reader.started
            position += reader.push(self._pending, position)
            if reader.started and not was_started:
                self._prose.note_call()
            if reader.broken:
                self._leave_broken_call(reader, position)
                return True
            if reader.done:
                self._pending = self._pending[position:]
                self._reader, self._raw, self._between_calls = None, "", True
                return True
        self._raw += "" if reader.started else self._pending
        self._pending = ""
        return False

    def _leave_broken_call(self, reader: CallReader, position: int) -> None:
        """An object that is not a call is content; a call may begin behind its first brace."""
        if reader.started:
            self._pending, self._raw = self._pending[position:], ""
            self._between_calls = True
        else:
            self._pending = self._raw[1:] + self._pending
            self._prose.add("{")
        self._reader, self._raw = None, ""


FORMAT = ToolFormat(
    models="Llama 3",
    marks=(PYTHON_TAG,),
    opens=(PYTHON_TAG,),
    new_parser=lambda tools: Llama3JsonToolParser(tools.names),
)
