"""The events that parsers find in generated text; a stream sends each as a delta, a whole answer joins them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest  # pydantic, which options are read without


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins; ``index`` counts the calls of one answer from 0.  Its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces joined are JSON text, as the model wrote it."""

    index: int
    text: str


ChatEvent: TypeAlias = ReasoningText | ContentText | CallStarted | CallArguments


class ToolParser(Protocol):
    """The parser of one sequence; its joined events are the same for every split of the text."""

    def feed(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text; returns the events that are certain now."""

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """The text has ended.  ``cut_off``: a limit ended it; drop half a mark at its end, instead of showing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How some models write tool calls; each format has a module and a line in ``chat/options.TOOL_FORMATS``.

    ``models`` names them in ``--help``.  Texts show ``marks`` also where the tokenizer calls them special tokens.
    """

    models: str
    marks: tuple[str, ...]
    new_parser: Callable[[ToolRequest], ToolParser]


class EventSink:
    """Collects the events of one ``feed`` and joins neighbouring pieces of the same kind."""

    def __init__(self) -> None:
        self._events: list[ChatEvent] = []
        self._pieces: list[str] = []
        self._call: int | None = None  # the call whose arguments the pieces are; None for content
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._add(text, None)

    def start_call(self, name: str) -> int:
        """Begin the next call; returns its index."""
        self._settle()
        index = self.num_calls
        self.num_calls += 1
        self._events.append(CallStarted(index, f"call_{uuid.uuid4().hex[:24]}", name))
        return index

    def arguments(self, index: int, text: str) -> None:
        """Add to the arguments of call ``index``."""
        self._add(text, index)

    def take(self) -> list[ChatEvent]:
        """The events since the last time."""
        self._settle()
        events, self._events = self._events, []
        return events

    def _add(self, text: str, call: int | None) -> None:
        if not text:
            return
        if call != self._call:
            self._settle()
            self._call = call
        self._pieces.append(text)

    def _settle(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._events.append(ContentText(text) if self._call is None else CallArguments(self._call, text))
            self._pieces = []


class Prose:
    """The text around calls: white space beside a call is layout, and dropped unless text is on both sides."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._space = ""
        self._has_text = False
        self._has_call = False

    def add(self, text: str) -> None:
        """Add text; white space at its end waits for what follows."""
        solid = text.rstrip()
        if not solid:
            self._space += text
            return
        whole = self._space + solid
        self._sink.content(whole.lstrip() if self._has_call and not self._has_text else whole)
        self._space = text[len(solid) :]
        self._has_text = True

    def note_call(self) -> None:
        """A call was found here."""
        self._has_call = True

    def finish(self) -> None:
        """Pass on the white space at the end of a text without calls."""
        if not self._has_call:
            self._sink.content(self._space)
        self._space = ""


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` with which ``marker`` begins, if it is not the whole marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
