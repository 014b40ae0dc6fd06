"""From the generated text of a chat to reasoning, content and tool calls.

Two parsers do it, one behind the other (``DividedParser``), or one that reads whole messages (``MessageFormat``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tp_engine.api.openai.reasoning import (
    Beginning,
    CallsInReasoning,
    ReasoningFormat,
    ReasoningParser,
    ReasoningTokens,
)
from tp_engine.api.openai.tools.events import (
    CallArguments,
    CallStarted,
    ChatEvent,
    ContentText,
    ForcedForm,
    MessageFormat,
    MessageParser,
    ReasoningText,
    ToolFormat,
    ToolParser,
    openai_call_id,
)
from tp_engine.api.openai.tools.forced import CallListParser, NamedCallParser
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.text_parser import TextParser

# Parsers look at pending text again and again, so they get a long text in pieces.
_PIECE = 4096
_CUT_OFF = ("length", "abort")


@dataclass(slots=True)
class ParsedMessage:
    """One whole answer.  ``calls`` are triples of id, name and arguments (JSON text)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0

    def add(self, events: Sequence[ChatEvent]) -> None:
        """Join further events."""
        for event in events:
            match event:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                case CallStarted(_, call_id, name):
                    self.calls.append((call_id, name, ""))
                case CallArguments(index, text):
                    call_id, name, before = self.calls[index]
                    self.calls[index] = (call_id, name, before + text)


@dataclass(frozen=True, kw_only=True)
class ChatParsing:
    """What to find in the texts of one answer; fixed by the request and shared by its sequences.

    ``tools`` None: no calls.  ``tool_format`` is that of the model (``--tool-call-parser``), for calls that the model
    chooses to make.  ``reasoning`` None: no reasoning; ``begins`` tells what texts begin with.  ``constrained``: a
    grammar decides what the answer is; ``may_call``: if the model answers, instead of calling.  ``message``: the format
    of whole messages that one of the two is part of; ``prompt`` may have begun the message.
    """

    tools: ToolRequest | None = None
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    begins: Beginning = Beginning.ANSWER
    constrained: bool = False
    may_call: bool = False
    message: MessageFormat | None = None
    prompt: str = ""
    include_reasoning: bool = True
    reasoning_tokens: ReasoningTokens | None = None

    @cached_property
    def forced(self) -> ForcedForm | None:
        """The form in which the model writes calls that the request forces; None: JSON without marks."""
        return None if self.tools is None or self.tool_format is None else self.tool_format.forced_form(self.tools)

    def new_parser(self) -> ChatParser:
        """Return a parser for one sequence."""
        return ChatParser(self)

    def parse(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> ParsedMessage:
        """Parse a whole text; the joined events of a stream give the same message."""
        parser, message = self.new_parser(), ParsedMessage()
        for start in range(0, len(text), _PIECE):
            message.add(parser.feed(text[start : start + _PIECE]))
        message.add(parser.finish(finish_reason))
        message.finish_reason = parser.finish_reason(finish_reason)
        if parser.message.has_reasoning and self.reasoning_tokens is not None:
            message.num_reasoning_tokens = self.reasoning_tokens.count(
                token_ids, parser.message.num_reasoning_characters
            )
        return message

    def message_parser(self) -> MessageParser:
        """Return the parser for the text of one sequence."""
        if self.message is not None:
            return self.message.new_parser(self.tools, self.prompt)
        if self.reasoning is None or (self.constrained and self.begins is Beginning.ANSWER):
            return DividedParser(None, self._tool_parser())
        if self.tools is None or self.tools.choice != "auto" or self.constrained:
            return DividedParser(self.reasoning.new_parser(self.begins), self._tool_parser())
        calls = CallsInReasoning(self._model_parser, self._model_format().opens, self.reasoning.closes)
        return DividedParser(self.reasoning.new_parser(self.begins, calls), calls)

    def _tool_parser(self) -> ToolParser | None:
        """The parser of one sequence's calls; without tools, one that drops marks from the answer, or None."""
        if self.tools is None:
            drops = () if self.reasoning is None or self.constrained else self.reasoning.drops
            return TextParser((), drops=drops) if drops else None
        new_call_id = openai_call_id if self.tool_format is None else self.tool_format.call_ids(self.tools)
        if self.forced is not None:
            return self._model_parser()
        if self.tools.choice == "required":
            return CallListParser(new_call_id)
        if self.tools.name is not None:
            return NamedCallParser(self.tools.name, new_call_id)
        return self._model_parser()

    def _model_parser(self) -> ToolParser:
        assert self.tools is not None
        return self._model_format().new_parser(self.tools)

    def _model_format(self) -> ToolFormat:
        assert self.tool_format is not None, "checked with the options"
        return self.tool_format


class ChatParser:
    """Turns the text of one sequence into events; joined, they are the same for every split of the text.

    Call ``feed`` with all text, then ``finish`` once, then ``finish_reason``.  ``message`` finds the reasoning.
    """

    def __init__(self, parsing: ChatParsing) -> None:
        self._parsing = parsing
        self.message = parsing.message_parser()
        self._shows_reasoning = parsing.reasoning is not None and parsing.include_reasoning
        self._max_calls = None if parsing.tools is None or parsing.tools.several else 1
        self._num_calls = 0
        self._num_reasoning_tokens = 0
        self._num_unsure_tokens = 0  # of reasoning or of a call

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning among those that ``feed`` got."""
        return self._num_reasoning_tokens if self.message.has_reasoning else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ChatEvent]:
        """Take the next piece of text with its tokens; returns the events that are certain now."""
        in_answer = self.message.in_answer
        events = self.message.feed(text)
        if self._parsing.reasoning_tokens is not None and in_answer is not True:
            self._count(self._parsing.reasoning_tokens.count_piece(token_ids), is_sure=in_answer is False)
        return self._allowed(events)

    def _count(self, num_tokens: int, *, is_sure: bool) -> None:
        """Count tokens of reasoning; those that may belong to a call wait until that is known."""
        if is_sure:
            self._num_reasoning_tokens += num_tokens
            return
        self._num_unsure_tokens += num_tokens
        if self.message.in_answer:
            is_reasoning = self.message.num_reasoning_characters is None
            self._num_reasoning_tokens += self._num_unsure_tokens if is_reasoning else 0
            self._num_unsure_tokens = 0

    def finish(self, finish_reason: str | None) -> list[ChatEvent]:
        """End the text for this reason; returns the events that were held back."""
        self._num_reasoning_tokens += self._num_unsure_tokens
        self._num_unsure_tokens = 0
        return self._allowed(self.message.finish(cut_off=finish_reason in _CUT_OFF))

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """``tool_calls`` for an answer that stopped with calls that the model chose to make."""
        chose = self._num_calls > 0 and self._parsing.tools is not None and self._parsing.tools.name is None
        return "tool_calls" if chose and finish_reason == "stop" else finish_reason

    def _allowed(self, events: list[ChatEvent]) -> list[ChatEvent]:
        """``events`` without the calls and the reasoning that the request does not allow."""
        if self._max_calls is not None:
            most, kinds = self._max_calls, (CallStarted, CallArguments)
            events = [one for one in events if not isinstance(one, kinds) or one.index < most]
        if not self._shows_reasoning:
            events = [one for one in events if not isinstance(one, ReasoningText)]
        self._num_calls += sum(isinstance(one, CallStarted) for one in events)
        return events


class DividedParser(MessageParser):
    """Two parsers: the first divides reasoning from answer, the second reads the answer.

    Without ``reasoning`` all text is the answer; without ``tools`` all of the answer is content.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.has_reasoning

    @property
    def in_answer(self) -> bool | None:
        return self._reasoning is None or self._reasoning.in_answer

    @property
    def num_reasoning_characters(self) -> int | None:
        return None if self._reasoning is None else self._reasoning.num_characters

    def feed(self, text: str) -> list[ChatEvent]:
        return self._answer(text) if self._reasoning is None else self._divided(*self._reasoning.feed(text))

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        events = [] if self._reasoning is None else self._divided(*self._reasoning.finish(cut_off=cut_off))
        return events if self._tools is None else events + self._tools.finish(cut_off=cut_off)

    def _divided(self, reasoning: str, answer: str) -> list[ChatEvent]:
        events: list[ChatEvent] = [ReasoningText(reasoning)] if reasoning else []
        return events + self._answer(answer) if answer or self.in_answer else events

    def _answer(self, text: str) -> list[ChatEvent]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [ContentText(text)] if text else []
