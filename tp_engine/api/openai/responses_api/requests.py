"""From a Responses body to the chat that answers it, and to the engine requests of that chat.

::

    input item                             message of the chat
    message (user, system, developer)      a message; developer becomes system, which chat templates know
    message (assistant), function_call,
    reasoning                              one assistant message, as long as they follow each other
    function_call_output                   a message of the role tool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.protocol import ChatBody, GenerationBody, request_error
from tp_engine.api.openai.requests import PreparedAnswer, prepare
from tp_engine.api.openai.responses_api.events import whole_response
from tp_engine.api.openai.responses_api.protocol import ResponsesBody, check_responses_body
from tp_engine.api.openai.responses_api.shape import ResponseShape
from tp_engine.errors import RequestError, shown
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}

# The field of a chat that an error names -> the field of the Responses body.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "top_logprobs",
}
_TOOL_KEYS = ("name", "description", "parameters", "strict")


def chat_body(body: ResponsesBody) -> ChatBody:
    """The chat that answers ``body``; raises ``RequestError`` that names a field of ``body``."""
    check_responses_body(body)
    shared = GenerationBody.model_fields.keys() - {"n", "stream_options"}
    fields = {name: value for name in shared if (value := getattr(body, name)) is not None}
    tools, tool_choice = _tools_and_choice(body)
    ours = {
        "messages": input_messages(body.input, body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _response_format(body),
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    fields |= {name: value for name, value in ours.items() if value is not None and name in ChatBody.model_fields}
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise renamed(request_error(error)) from None


def renamed(error: RequestError) -> RequestError:
    """``error`` of the chat, with the name that the field has in a Responses body."""
    theirs, text = error.param or "", str(error)
    ours = _NAMES.get(theirs)
    if ours is None:
        return error
    if text.startswith(theirs):
        text = ours + text[len(theirs) :]
    return RequestError(text, param=ours, code=error.code)


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    asked = None if body.text is None else body.text.format
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") != "json_schema":
        return {"type": asked.get("type")}
    schema = {name: asked[name] for name in ("name", "description", "schema", "strict") if name in asked}
    return {"type": "json_schema", "json_schema": schema}


def _tools_and_choice(body: ResponsesBody) -> tuple[list[dict[str, Any]] | None, Any]:
    tools = [_chat_tool(f"tools[{number}]", tool) for number, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return tools or None, choice if tools or choice != "auto" else None
    kind = choice.get("type")
    if kind == "function":
        return tools or None, {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        return _allowed(tools, choice) or None, choice.get("mode", "auto")
    raise RequestError(
        f"tool_choice has the type {str(kind)[:40]!r}; it must be function or allowed_tools, or one of the words "
        "auto, none, required",
        param="tool_choice",
    )


def _chat_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where} has the type {str(tool.get('type'))[:40]!r}; this server runs no tools of its own, only function "
            "tools that the client runs",
            param="tools",
        )
    function = {name: tool[name] for name in _TOOL_KEYS if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    named = choice.get("tools")
    names = [tool.get("name") for tool in named if isinstance(tool, Mapping)] if isinstance(named, list) else []
    allowed = [tool for tool in tools if tool["function"].get("name") in names]
    if not allowed:
        raise RequestError("tool_choice allows none of the tools; name at least one of them", param="tool_choice")
    return allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """The chat that answers a response, checked, and the shape of the response."""

    chat_body: ChatBody
    chat: PreparedAnswer
    shape: ResponseShape

    @property
    def requests(self) -> list[EngineRequest]:
        """The requests for the engine: one."""
        return self.chat.requests

    def answer(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The whole response; ``outputs`` has one element."""
        return whole_response(self.shape, self.chat.shape.answer(outputs))


def prepare_response(
    body: ResponsesBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedResponse:
    """As ``requests.prepare``; raises ``RequestError`` that names a field of ``body``."""
    chat = chat_body(body)
    try:
        prepared = prepare(chat, processor, model, defaults)
    except RequestError as error:
        raise renamed(error) from None
    return PreparedResponse(chat_body=chat, chat=prepared, shape=ResponseShape.of(body, prepared))


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
            f"{where}.type is {shown(kind, 60)}; it must be message, function_call, function_call_output or reasoning",
            param="input",
        )


def _add_message(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {shown(role, 60)}; it must be one of {', '.join(_ROLES)}", param="input")
    text = _text(f"{where}.content", item.get("content"))
    if role != "assistant":
        messages.append({"role": _ROLES[role], "content": text})
        return
    _assistant(messages, begins_turn=True)["content"] = text


def _assistant(messages: list[dict[str, Any]], *, begins_turn: bool = False) -> dict[str, Any]:
    """The assistant's message that the conversation ends with, or a new one.

    Text that ``begins_turn`` can not follow text or calls of the same message.
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
        raise RequestError(f"{where} is {shown(content, 60)}; it must be text or a list of text parts", param="input")
    return "".join(_part_text(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if isinstance(part, Mapping):
        kind = part.get("type")
        name = "refusal" if kind == "refusal" else "text"
        if isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get(name), str):
            return str(part[name])
        raise RequestError(f"{where} has the type {shown(kind, 60)}; only parts of text are supported", param="input")
    raise RequestError(f"{where} is {shown(part, 60)}; it must be a part such as an input_text", param="input")


def _string(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is {shown(value, 60)}; it must be text", param="input")
    return value
