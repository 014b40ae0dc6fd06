"""From the generated text of a chat to reasoning, content and tool calls.

Two parsers do it, one after the other (``ReasoningParser``), or one that reads whole messages (``MessageFormat``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tp_engine.api.openai.reasoning import Beginning, ReasoningFormat, ReasoningParser, ReasoningTokens
from tp_engine.api.openai.tools.events import (
    CallArguments,
    CallStarted,
    ChatEvent,
    ContentText,
    ReasoningText,
    openai_call_id,
)
from tp_engine.api.openai.tools.forced import CallListParser, NamedCallParser
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.text_parser import MessageParser, TextParser
from tp_engine.api.openai.tools.tool_format import MessageFormat, ToolFormat

_CUT_OFF = ("length", "abort")


@dataclass(slots=True)
class ParsedMessage:
    """One whole answer.  ``calls`` are triples of id, name and arguments (JSON text).  ``events`` have the order in
    which the model wrote them."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0
    events: list[ChatEvent] = field(default_factory=list)

    def add(self, events: Sequence[ChatEvent]) -> None:
        """Join further events."""
        self.events += events
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
    of whole messages that one of the two is part of; ``prompt`` may have begun the message.  ``forced`` is the grammar
    of calls that the request forces, in the model's own form; None: they are JSON without
    marks.  ``budget``: how many tokens of reasoning there may be.
    """

    tools: ToolRequest | None = None
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    begins: Beginning = Beginning.ANSWER
    constrained: bool = False
    may_call: bool = False
    message: MessageFormat | None = None
    prompt: str = ""
    forced: str | None = None
    include_reasoning: bool = True
    reasoning_tokens: ReasoningTokens | None = None
    budget: int | None = None

    def new_parser(self) -> ChatParser:
        """A parser for one sequence."""
        return ChatParser(self)

    def parse(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> ParsedMessage:
        """Parse a whole text; the joined events of a stream give the same message."""
        parser, message = self.new_parser(), ParsedMessage()
        message.add(parser.feed(text, token_ids))
        message.add(parser.finish(finish_reason))
        message.finish_reason = parser.finish_reason(finish_reason)
        message.num_reasoning_tokens = parser.num_reasoning_tokens
        return message

    def message_parser(self) -> MessageParser:
        """The parser for the text of one sequence."""
        if self.message is not None:
            return self.message.new_parser(self.tools, self.prompt)
        if self.reasoning is None or (self.constrained and self.begins is Beginning.ANSWER):
            return ReasoningParser(None, self.begins, self._new_tool_parser())
        may_call = self.tools is not None and self.tools.choice == "auto" and not self.constrained
        calls = self._model_format().opens if may_call else ()
        return ReasoningParser(self.reasoning, self.begins, self._new_tool_parser(), calls)

    def _new_tool_parser(self) -> Callable[[], TextParser] | None:
        """What makes the parser of calls; without tools, one that drops marks from the answer, or None."""
        tools = self.tools
        if tools is None:
            drops = () if self.reasoning is None or self.constrained else self.reasoning.drops
            return (lambda: TextParser((), drops=drops)) if drops else None
        if tools.choice == "auto" or self.forced is not None:
            return lambda: self._model_format().new_parser(tools)
        new_call_id = openai_call_id if self.tool_format is None else self.tool_format.call_ids(tools)
        if tools.name is None:
            return lambda: CallListParser(new_call_id)
        name = tools.name
        return lambda: NamedCallParser(name, new_call_id)

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
        self._token_ids: list[int] = []
        self._counts_tokens = parsing.reasoning_tokens is not None
        self.num_reasoning_tokens = 0  # among those that ``feed`` got; those of what may be a call are not yet counted

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ChatEvent]:
        """Take the next piece of text with its tokens; returns the events that are certain now."""
        events = self.message.feed(text)
        if self._counts_tokens:
            self._token_ids += token_ids
            self._count(self.message.in_answer)
        return self._allowed(events)

    def _count(self, in_answer: bool | None) -> None:
        counter, message = self._parsing.reasoning_tokens, self.message
        if message.has_reasoning and counter is not None:
            if in_answer:
                self.num_reasoning_tokens = counter.count(self._token_ids, message.num_reasoning_characters)
            elif in_answer is False:
                self.num_reasoning_tokens = len(self._token_ids)
        self._counts_tokens = not in_answer

    def finish(self, finish_reason: str | None) -> list[ChatEvent]:
        """End the text for this reason; returns the events that were held back.

        A grammar completes forced calls, so what has not become one by its end was cut off, by a stop string perhaps.
        """
        events = self.message.finish(
            cut_off=finish_reason in _CUT_OFF or (self._parsing.forced is not None and self._parsing.message is None)
        )
        if self._counts_tokens:
            self._count(self.message.in_answer or False)
        return self._allowed(events)

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
