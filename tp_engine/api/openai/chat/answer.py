"""Parsed texts as the OpenAI API writes them: a ``message``, or the ``delta`` of a chunk."""

from __future__ import annotations

from typing import Any

from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.tools.events import CallArguments, CallStarted, ChatEvent, ContentText, ReasoningText


def message_json(parsing: ChatParsing, parsed: ParsedMessage, role: str, echo: str = "") -> dict[str, Any]:
    """The message of a whole answer; ``echo`` is a text to repeat before its content.

    Content is null beside calls without text.  Reasoning comes under its newer name too; without any it is null.
    """
    content = echo + parsed.content
    message: dict[str, Any] = {"role": role, "content": content if content or not _has_more(parsed) else None}
    if parsing.inside is not None:
        message["reasoning_content"] = message["reasoning"] = parsed.reasoning or None
    if parsed.calls:
        message["tool_calls"] = [_call_json(*call) for call in parsed.calls]
    return message


def delta_json(event: ChatEvent) -> dict[str, Any]:
    """What one event adds to a message that is streamed."""
    match event:
        case ReasoningText(text):
            return {"reasoning_content": text, "reasoning": text}
        case ContentText(text):
            return {"content": text}
        case CallStarted(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call_json(call_id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _has_more(parsed: ParsedMessage) -> bool:
    return bool(parsed.calls or parsed.reasoning)


def _call_json(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
