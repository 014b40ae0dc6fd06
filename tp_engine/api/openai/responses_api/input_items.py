"""From the input items of a response to the messages of a chat.

::

    message (user, system, developer)      -> a message; developer is called system, as chat templates know it
    message (assistant), function_call,
    reasoning                              -> one assistant message, as long as nothing else comes between them
    function_call_output                   -> a message of the role tool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.errors import RequestError

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}


def input_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages of an ``input``; ``instructions`` come first.  Raises ``RequestError``.

    System messages at the beginning become one, because most chat templates take only one.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise RequestError("input is an empty list; give text or at least one item", param="input")
    for number, item in enumerate(items):
        _add_item(messages, f"input[{number}]", item)
    return _one_system_message(messages)


def _add_item(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, where, item)
    elif kind == "function_call":
        _assistant(messages).setdefault("tool_calls", []).append(_tool_call(where, item))
    elif kind == "function_call_output":
        output = _text(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": _string(where, item, "call_id"), "content": output})
    elif kind == "reasoning":
        text = _text(f"{where}.content", item.get("content") or item.get("summary") or "")
        if text:
            message = _assistant(messages, begins_turn=True)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif kind == "item_reference":
        raise RequestError(f"{where} is an item_reference; this server stores no items, send it whole", param="input")
    else:
        raise RequestError(
            f"{where}.type is {_shown(kind)}; it must be message, function_call, function_call_output or reasoning",
            param="input",
        )


def _add_message(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {_shown(role)}; it must be one of {', '.join(_ROLES)}", param="input")
    text = _text(f"{where}.content", item.get("content"))
    if role != "assistant":
        messages.append({"role": _ROLES[role], "content": text})
        return
    _assistant(messages, begins_turn=True)["content"] = text


def _assistant(messages: list[dict[str, Any]], *, begins_turn: bool = False) -> dict[str, Any]:
    """The assistant's message that the conversation ends with, or a new one.

    What ``begins_turn`` can not follow text or calls of the same message.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (begins_turn and (last.get("content") or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: _string(where, item, name) for name in ("name", "arguments")}
    return {"id": _string(where, item, "call_id"), "type": "function", "function": function}


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:leading])
    return [{"role": "system", "content": text}, *messages[leading:]]


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {_shown(content)}; it must be text or a list of text parts", param="input")
    return "".join(_part_text(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type")
        name = "refusal" if kind == "refusal" else "text"
        if isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get(name), str):
            return str(part[name])
        raise RequestError(f"{where} has the type {_shown(kind)}; only parts of text are supported", param="input")
    raise RequestError(f"{where} is {_shown(part)}; it must be a part such as an input_text", param="input")


def _string(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is {_shown(value)}; it must be text", param="input")
    return value


def _shown(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
