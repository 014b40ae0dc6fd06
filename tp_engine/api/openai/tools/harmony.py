"""Messages of gpt-oss, in OpenAI's harmony format: reasoning, content and calls in one text.

::

    OUTSIDE --<|start|>, <|channel|>, <|message|>, to=--> HEADER --<|message|>--> BODY
     ^   +------- anything else: content, without a header ------------------------^ |
     +---- <|end|>, <|call|>, <|return|>, or the next message's <|start|>, <|channel|> --+

    <|channel|>analysis<|message|>A tool.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 4.<|return|>

The prompt ends with ``<|start|>assistant``.  The header tells what a body is: a call, for a message to
``functions.NAME`` (the recipient may stand before the channel); content, for the channel ``final``; reasoning, for the
channel ``analysis`` and for messages to others; else content.  A call that the request does not want is reasoning.  An
empty line joins texts of one kind.
"""

from __future__ import annotations

import enum
import json
import re
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.events import (
    ChatEvent,
    EventSink,
    MessageFormat,
    ToolFormat,
    Writing,
    first_mark,
    partial_suffix,
)
from tp_engine.grammar.library import inner_schema

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest
    from tp_engine.structured_outputs import StructuredOutputsParams

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END = "<|end|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_STOPS = ("<|call|>", "<|return|>")
_ENDS = (END, *_STOPS)
_BREAKS = (*_ENDS, START, CHANNEL)
_HEADERS = (START, CHANNEL, MESSAGE, "to=")
_ANSWERER = f"{START}assistant"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_FUNCTIONS = "functions."
_MAX_HEADER = 1024
_GAP = "\n\n"


class _State(enum.Enum):
    OUTSIDE = enum.auto()
    HEADER = enum.auto()
    BODY = enum.auto()


class _Kind(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class HarmonyParser:
    """A ``MessageParser``.  ``tools`` None: calls are not wanted.  ``prompt`` may have begun the first message."""

    def __init__(self, tools: ToolRequest | None, prompt: str = "") -> None:
        self._names = None if tools is None else tools.names
        self._sink = EventSink()
        self._state = _State.OUTSIDE
        self._pending = ""
        self._kind = _Kind.CONTENT
        self._call = 0
        self._first: _Kind | None = None
        self._first_ended = False
        self._is_empty = True  # the message has no text yet
        self._shown: set[_Kind] = set()  # the kinds with text of earlier messages
        self.feed(prompt.rpartition(_ANSWERER)[2] if _ANSWERER in prompt else "")

    @property
    def has_reasoning(self) -> bool:
        """See ``MessageParser``."""
        return self._first is _Kind.REASONING

    @property
    def in_answer(self) -> bool | None:
        """See ``MessageParser``."""
        return self._first_ended or self._first in (_Kind.CONTENT, _Kind.CALL)

    @property
    def num_reasoning_characters(self) -> int | None:
        """See ``MessageParser``."""
        return None

    def feed(self, text: str) -> list[ChatEvent]:
        """See ``ToolParser``."""
        if self._state is _State.BODY and not self._pending and "<" not in text:
            self._give(text)
            return self._sink.take()
        self._pending += text
        while self._pending and self._step():
            pass
        return self._sink.take()

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        """See ``ToolParser``."""
        pending, self._pending = self._pending, ""
        if not cut_off:
            if self._state is _State.BODY:
                self._give(pending)
                self._end()
            elif self._first is None and not pending.startswith("<|"):
                self._give(pending)
        return self._sink.take()

    def _step(self) -> bool:
        """Read some of the pending text; False if that needs more text."""
        match self._state:
            case _State.OUTSIDE:
                return self._read_outside()
            case _State.HEADER:
                return self._read_header()
            case _State.BODY:
                return self._read_body()

    def _read_outside(self) -> bool:
        rest = self._pending.lstrip()
        end = next((mark for mark in _ENDS if rest.startswith(mark)), None)
        if end is not None:
            self._pending = rest[len(end) :]
        elif rest.startswith(_HEADERS):
            self._state, self._pending = _State.HEADER, rest
        elif any(mark.startswith(rest) for mark in (*_ENDS, *_HEADERS)):
            return False
        else:
            self._begin(_Kind.CONTENT)
        return True

    def _read_header(self) -> bool:
        place = self._pending.find(MESSAGE)
        length = place if place >= 0 else len(self._pending) - partial_suffix(self._pending, MESSAGE)
        if length > _MAX_HEADER:  # no header: content from its first characters on
            self._begin(_Kind.CONTENT)
            self._give(self._pending[:2])
            self._pending = self._pending[2:]
            return True
        if place < 0:
            return False
        header, self._pending = self._pending[:place], self._pending[place + len(MESSAGE) :]
        channel, recipient = _last(_CHANNEL_NAME, header), _last(_RECIPIENT, header)
        name = self._wanted_call(recipient)
        if name:
            self._call = self._sink.start_call(name)
            self._begin(_Kind.CALL)
        else:
            to_user = channel == "final" or not (recipient or channel == "analysis")
            self._begin(_Kind.CONTENT if to_user else _Kind.REASONING)
        return True

    def _read_body(self) -> bool:
        found = first_mark(self._pending, _BREAKS)
        if found is None:
            settled = len(self._pending) - partial_suffix(self._pending, *_BREAKS)
            self._give(self._pending[:settled])
            self._pending = self._pending[settled:]
            return False
        place, mark = found
        self._give(self._pending[:place])
        self._pending = self._pending[place + len(mark) * (mark in _ENDS) :]
        self._end()
        return True

    def _wanted_call(self, recipient: str) -> str:
        """The function that a message calls; empty for another message, and for a call that is not wanted."""
        if self._names is None:
            return ""
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._names else ""

    def _begin(self, kind: _Kind) -> None:
        self._state, self._kind, self._is_empty = _State.BODY, kind, True
        self._first = self._first or kind

    def _end(self) -> None:
        if self._kind is _Kind.CALL and self._is_empty:
            self._sink.arguments(self._call, "{}")
        elif not self._is_empty:
            self._shown.add(self._kind)
        self._state, self._first_ended = _State.OUTSIDE, True

    def _give(self, text: str) -> None:
        """Pass on text of the body."""
        if not text:
            return
        gap = _GAP if self._is_empty and self._kind in self._shown else ""
        self._is_empty = False
        match self._kind:
            case _Kind.CALL:
                self._sink.arguments(self._call, text)
            case _Kind.REASONING:
                self._sink.reasoning(gap + text)
            case _Kind.CONTENT:
                self._sink.content(gap + text)


def _last(pattern: re.Pattern[str], header: str) -> str:
    return str((pattern.findall(header) or [""])[-1])


def _thought(writing: Writing) -> str:
    """The rule for a message of reasoning up to the next message's header."""
    channel, message, start = map(writing.mark, (CHANNEL, MESSAGE, START))
    return (
        f'thought: {channel} "analysis" {message} thinking {start} "assistant"\n{writing.text_until("thinking", END)}\n'
    )


def _preamble(writing: Writing, thinks: bool) -> str:
    """Reasoning, or none, and the header of the final message."""
    channel, message = writing.mark(CHANNEL), writing.mark(MESSAGE)
    final = f'{channel} "final" {message} @answer'
    return f"start: thought? {final}\n{_thought(writing)}" if thinks else f"start: {final}\n"


def _forced_calls(tools: ToolRequest, writing: Writing, thinks: bool, like: StructuredOutputsParams) -> str:
    """Reasoning, or none, and one call of a tool that the choice allows: the model's turn ends with a call."""
    channel, constrain, message = map(writing.mark, (CHANNEL, CONSTRAIN, MESSAGE))
    schemas = tools.argument_schemas()
    calls = " | ".join(
        f'{json.dumps(f"{name} ")} {constrain} "json" {message} arguments_{rule}'
        for rule, (name, _) in enumerate(schemas)
    )
    rules = [f"arguments_{rule}: %json {inner_schema(schema, like)}" for rule, (_, schema) in enumerate(schemas)]
    first = f'{channel} "commentary to={_FUNCTIONS}" call\ncall: {calls}'
    start = f"start: thought? {first}\n{_thought(writing)}" if thinks else f"start: {first}\n"
    return start + "\n".join(rules)


HARMONY = MessageFormat(
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS),
    stops=_STOPS,
    new_parser=HarmonyParser,
    preamble=_preamble,
    forced_calls=_forced_calls,
)
FORMAT = ToolFormat(models="gpt-oss", marks=HARMONY.marks, new_parser=HarmonyParser, message=HARMONY)
