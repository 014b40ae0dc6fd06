"""From a Responses body to the chat that answers it, and to the engine requests of that chat."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.body import chat_prompt
from tp_engine.api.openai.errors import renamed
from tp_engine.api.openai.protocol import ChatBody, GenerationBody, ThinkingBody, request_error
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.requests import PreparedFromChat, prepare
from tp_engine.api.openai.responses_api.events import ResponseWriter
from tp_engine.api.openai.responses_api.items import additional_tools, input_messages
from tp_engine.api.openai.responses_api.protocol import ResponsesBody, check_responses_body
from tp_engine.api.openai.responses_api.tools import ResponseTools
from tp_engine.errors import RequestError, shown

# The field of a chat that an error names -> the field of the Responses body.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "top_logprobs",
}


def chat_body(body: ResponsesBody, *, takes_images: bool = False, seal: ReasoningSeal | None = None) -> ChatBody:
    """The chat that answers ``body``, for a model that ``takes_images`` or not; raises ``RequestError`` that
    names a field of ``body``.  ``seal`` opens reasoning; None: sealed reasoning is left out."""
    check_responses_body(body)
    shared = (GenerationBody.model_fields.keys() | ThinkingBody.model_fields.keys()) - {"n", "stream_options"}
    fields = {name: value for name in shared if (value := getattr(body, name)) is not None}
    tools, tool_choice = _tools(body).for_chat(body.tool_choice)
    try:
        messages = input_messages(_opened(body.input, seal), body.instructions, takes_images=takes_images)
    except RequestError as error:
        raise renamed(error, NAMES) from None
    ours = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": _response_format(body),
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
    }
    fields |= {name: value for name, value in ours.items() if value is not None and name in ChatBody.model_fields}
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise renamed(request_error(error), NAMES) from None


def count_tokens(body: ResponsesBody, processor: InputProcessor) -> int:
    """The number of prompt tokens of ``body``; raises ``RequestError``."""
    asked = chat_body(body, takes_images=processor.images is not None, seal=processor.chat.seal)
    try:
        chat = chat_prompt(asked, processor)
        tokens = processor.chat_tokens(chat, add_special_tokens=bool(body.add_special_tokens), stages=False)
    except RequestError as error:
        raise renamed(error, NAMES) from None
    return len(tokens["prompt_token_ids"])


def _opened(items: str | list[dict[str, Any]], seal: ReasoningSeal | None) -> str | list[dict[str, Any]]:
    """``items`` with the text of sealed reasoning; if another server has sealed it, with its summary."""
    if isinstance(items, str) or seal is None:
        return items
    opened = []
    for number, item in enumerate(items):
        sealed = item.get("encrypted_content") if item.get("type") == "reasoning" and not item.get("content") else None
        text = seal.opened(sealed) if isinstance(sealed, str) else None
        if sealed and text is None and not item.get("summary"):
            raise RequestError(
                f"input[{number}].encrypted_content is {shown(sealed)}, which this server did not write, or wrote "
                "before its last start; send the item with its content or a summary, or leave it out, and serve with "
                "--reasoning-key to read it later",
                param="input",
                code="invalid_encrypted_content",
            )
        opened.append(item if text is None else {**item, "content": [{"type": "reasoning_text", "text": text}]})
    return opened


def _tools(body: ResponsesBody) -> ResponseTools:
    return ResponseTools.of([*(body.tools or ()), *additional_tools(body.input)])


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    asked = None if body.text is None else body.text.format
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") != "json_schema":
        return {name: asked[name] for name in ("type", "schema") if name in asked}
    schema = {name: asked[name] for name in ("name", "description", "schema", "strict") if name in asked}
    return {"type": "json_schema", "json_schema": schema}


def prepare_response(
    body: ResponsesBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedFromChat:
    """The engine requests of a response, and what makes answers of their outputs; ``RequestError`` names a field
    of ``body``."""
    seal = processor.chat.seal
    chat = chat_body(body, takes_images=processor.images is not None, seal=seal)
    try:
        prepared = prepare(chat, processor, model, defaults)
    except RequestError as error:
        raise renamed(error, NAMES) from None
    tools = _tools(body)
    return PreparedFromChat(
        chat=prepared,
        new_writer=lambda: ResponseWriter(body, prepared, tools, seal),
        requests=[replace(request, prompt_field=NAMES["messages"]) for request in prepared.requests],
        answer=lambda outputs: ResponseWriter(body, prepared, tools, seal).whole(
            prepared.shape.answer(outputs, in_order=True)
        ),
        named=lambda error: renamed(prepared.named(error), NAMES),
    )
