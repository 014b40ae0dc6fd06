"""From a Responses body to the chat body that does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tp_engine.api.openai.protocol import ChatBody, GenerationBody, request_error
from tp_engine.api.openai.responses_api.input_items import input_messages
from tp_engine.api.openai.responses_api.protocol import ResponsesBody, check_responses_body
from tp_engine.errors import RequestError

# What a complaint about the chat is called in the request that the client wrote.
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
    """``error`` about the chat, with the field called as in a Responses body."""
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
