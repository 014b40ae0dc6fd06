"""Messages of gpt-oss, in OpenAI's harmony format: reasoning, content and calls in one text.

::

    <|channel|>analysis<|message|>A tool.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 4.<|return|>

The prompt ends with ``<|start|>assistant``.  The header says what a body is: a call, for a message to
``functions.NAME`` (the recipient may stand before the channel); content, for the channel ``final``; reasoning, for the
channel ``analysis`` and for messages to others; else content.  A call that the request does not want is reasoning.  An
empty line joins texts of one kind.
"""

from __future__ import annotations

import enum
import json
import re
from typing import TYPE_CHECKING

from tp_engine.api.openai.tools.text_parser import EndOfTextError, MessageParser, Reading
from tp_engine.api.openai.tools.tool_format import MessageFormat, TemplateMarks, ToolFormat
from tp_engine.grammar.library import inner_schema

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest
    from tp_engine.api.openai.tools.token_writing import TokenWriting
    from tp_engine.requests.structured_outputs import StructuredOutputsParams

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


class _MessageKind(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class HarmonyParser(MessageParser):
    """The parser of whole messages; its text is that of a message's body, whatever its kind.

    ``tools`` None: calls are not wanted.  ``prompt`` may have begun the first message.
    """

    def __init__(self, tools: ToolRequest | None, prompt: str = "") -> None:
        super().__init__(_BREAKS)
        self._names = None if tools is None else tools.names
        self._kind = _MessageKind.CONTENT
        self._is_first = True  # no message has begun
        self._is_empty = True  # the message has no text yet
        self._shown: set[_MessageKind] = set()  # the kinds with text of earlier messages
        self.feed(prompt.rpartition(_ANSWERER)[2] if _ANSWERER in prompt else "")

    def _read(self) -> Reading[None]:
        while True:
            try:
                yield from self._read_header()
            except EndOfTextError:
                if self._is_first and not self._pending.startswith("<|"):
                    self._give(self._pending)
                raise
            try:
                mark = yield from self._read_text()
            except EndOfTextError:
                self._end_message()
                raise
            self._take(len(mark) if mark in _ENDS else 0)
            self._end_message()

    def _read_header(self) -> Reading[None]:
        """Read what is between two bodies, and begin a message of the kind that it names."""
        self._is_unsure = True
        while (mark := (yield from self._mark(*_ENDS, *_HEADERS))) in _ENDS:
            self._take(self._at)
        if not mark:
            self._begin(_MessageKind.CONTENT)
            return
        self._take(self._at - len(mark))
        found = yield from self._up_to((MESSAGE,), _MAX_HEADER)
        if found is None:  # no header: content from its first characters on
            self._begin(_MessageKind.CONTENT)
            self._give(self._take(2))
            return
        self._take(self._at)
        channel, recipient = _last(_CHANNEL_NAME, found[0]), _last(_RECIPIENT, found[0])
        name = recipient.removeprefix(_FUNCTIONS)
        if self._names is not None and name and (name != recipient or name in self._names):
            self._sink.start_call(name)
            self._begin(_MessageKind.CALL)
        else:
            to_user = channel == "final" or not (recipient or channel == "analysis")
            self._begin(_MessageKind.CONTENT if to_user else _MessageKind.REASONING)

    def _begin(self, kind: _MessageKind) -> None:
        self._kind, self._is_empty, self._is_unsure, self._at = kind, True, False, 0
        if self._is_first:
            self._is_first, self.has_reasoning = False, kind is _MessageKind.REASONING
            self.in_answer = not self.has_reasoning

    def _end_message(self) -> None:
        if self._kind is _MessageKind.CALL and self._is_empty:
            self._sink.arguments("{}")
        elif not self._is_empty:
            self._shown.add(self._kind)
        self.in_answer = True

    def _give(self, text: str) -> None:
        """Pass on text of the body."""
        if not text:
            return
        gap = _GAP if self._is_empty and self._kind in self._shown else ""
        self._is_empty = False
        match self._kind:
            case _MessageKind.CALL:
                self._sink.arguments(text)
            case _MessageKind.REASONING:
                self._sink.reasoning(gap + text)
            case _MessageKind.CONTENT:
                self._sink.content(gap + text)


def _last(pattern: re.Pattern[str], header: str) -> str:
    return str((pattern.findall(header) or [""])[-1])


def _thought(writing: TokenWriting) -> str:
    """The rule for a message of reasoning up to the next message's header."""
    channel, message, start = map(writing.mark, (CHANNEL, MESSAGE, START))
    return (
        f'thought: {channel} "analysis" {message} thinking {start} "assistant"\n{writing.text_until("thinking", END)}\n'
    )


def _preamble(writing: TokenWriting, thinks: bool, may_call: bool) -> str:
    """Reasoning, or none, and the header of the final message, or a call of any kind."""
    channel, message = writing.mark(CHANNEL), writing.mark(MESSAGE)
    last, rules = f'{channel} "final" {message} @answer', ""
    if may_call:
        last, rules = f'({last} | {channel} "commentary" rest)', writing.any_text("rest", *HARMONY.marks) + "\n"
    return f"start: thought? {last}\n{_thought(writing)}{rules}" if thinks else f"start: {last}\n{rules}"


def _forced_calls(tools: ToolRequest, writing: TokenWriting, thinks: bool, like: StructuredOutputsParams) -> str:
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


TEMPLATE = (TemplateMarks((CHANNEL, START)),)
HARMONY = MessageFormat(
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS),
    stops=_STOPS,
    new_parser=HarmonyParser,
    preamble=_preamble,
    forced_calls=_forced_calls,
)
FORMAT = ToolFormat(
    models="gpt-oss",
    aliases=("gpt-oss",),
    template=TEMPLATE,
    marks=HARMONY.marks,
    new_parser=HarmonyParser,
    message=HARMONY,
)
