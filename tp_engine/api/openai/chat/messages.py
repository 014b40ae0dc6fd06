"""From chat messages as clients send them to messages as templates expect them.

| clients send | templates get |
| --- | --- |
| null fields, as the OpenAI library dumps them | nothing |
| content as text or as parts of text | text, or parts if the template loops over them |
| tool_calls with arguments as JSON text | arguments as an object |
| reasoning | reasoning_content too, its name in most templates, or thinking if the template knows that alone |
| an answer of a tool, with the call's id | also the function's name |
| role developer | system, if the template does not know developer |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.errors import RequestError


def normal_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool = False,
    knows_developer: bool = False,
    takes_thinking: bool = False,
) -> list[dict[str, Any]]:
    """Checked copies; raises ``RequestError`` that names the faulty message.

    ``as_parts``: contents become lists of ``{"type": "text", "text": ...}``, otherwise text, parts joined with line
    ends.  ``takes_thinking``: reasoning is also given as ``thinking``, but for messages with both content and calls,
    which the template of gpt-oss refuses.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    normal = [_normal_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    _name_tools(normal)
    for message in normal:
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        texts = message["content"]
        if takes_thinking and "reasoning_content" in message and not (any(texts) and "tool_calls" in message):
            message.setdefault("thinking", message["reasoning_content"])
        message["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    return normal


def with_argument_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Copies with the arguments of calls as JSON text, for templates that take no objects; None without calls."""
    if not any("tool_calls" in message for message in messages):
        return None
    return [{**message, **_calls_with_texts(message.get("tool_calls"))} for message in messages]


def _calls_with_texts(calls: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    if calls is None:
        return {}
    functions = [call["function"] for call in calls]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    return {
        "tool_calls": [
            {**call, "function": {**function, "arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    }


def _name_tools(messages: Sequence[dict[str, Any]]) -> None:
    """Add function names to tools' answers: clients give the id of the call, some templates need the function."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message["name"] = name


def _normal_message(where: str, message: object) -> dict[str, Any]:
    """A checked copy whose content is a list of texts."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r}; it must have a role and a content", param="messages")
    normal = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; it must be text such as 'user'", param="messages")
    normal["content"] = _texts(where, role, normal.get("content"))
    if calls := normal.pop("tool_calls", None):
        normal["tool_calls"] = _tool_calls(f"{where}.tool_calls", calls)
    reasoning = normal.get("reasoning_content", normal.get("reasoning"))
    if reasoning is not None:
        normal["reasoning_content"] = reasoning
    return normal


def _texts(where: str, role: str, content: object) -> list[str]:
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where} has no content; it must be text, or a list of text parts", param="messages")
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where}.content must be text, or a list of text parts", param="messages")
    return [_part_text(where, part) for part in content]


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    key = {"text": "text", "refusal": "refusal"}.get(str(kind))
    if isinstance(part, Mapping) and key is not None and isinstance(part.get(key), str):
        return str(part[key])
    raise RequestError(f"{where}.content has a part of type {kind!r}; only text is supported", param="messages")


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} must be a list of calls", param="messages")
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be {{'id', 'type': 'function', 'function': {{'name'}}}}", param="messages")
    arguments = function.get("arguments")
    return {**call, "function": {**function, "arguments": _arguments(f"{where}.function.arguments", arguments)}}


def _arguments(where: str, given: object) -> dict[str, Any]:
    """The object of JSON text; templates write it in their model's own spelling."""
    try:
        arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}", param="messages") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be the JSON text of an object", param="messages")
    return arguments
