"""From a Messages body to the chat that answers it, and to the engine request of that chat."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tp_engine.api.anthropic.client_tools import client_function
from tp_engine.api.anthropic.events import MessageWriter
from tp_engine.api.anthropic.messages import TOOL_CHANGES, chat_messages
from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody, Tool, ToolChoice
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.body import chat_prompt
from tp_engine.api.openai.errors import renamed
from tp_engine.api.openai.protocol import ChatBody, PromptBody, ThinkingBody, request_error
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.requests import PreparedFromChat, prepare
from tp_engine.errors import ContextLengthError, RequestError, shown
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

# The field of a chat that an error names -> the field of the Messages body.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "thinking",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def prepare_message(
    body: MessagesBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedFromChat:
    """The engine requests of a message, with what turns their outputs into its answer; ``RequestError`` names a field
    of ``body``."""
    try:
        seal = processor.chat.seal
        body_of_chat = chat_body(body, takes_images=processor.images is not None, seal=seal)
        chat = prepare(body_of_chat, processor, model, defaults)
    except ContextLengthError as error:
        raise _too_long(error) from None
    except RequestError as error:
        raise renamed(error, NAMES) from None
    return PreparedFromChat(
        chat=chat,
        new_writer=lambda: MessageWriter(body, chat, seal),
        requests=chat.requests,
        answer=lambda outputs: MessageWriter(body, chat, seal).whole(chat.shape.answer(outputs, in_order=True)),
        named=lambda error: renamed(chat.named(error), NAMES),
    )


def count_tokens(body: CountTokensBody, processor: InputProcessor) -> dict[str, Any]:
    """The answer of ``count_tokens``: the length of the prompt of ``body``."""
    try:
        takes_images = processor.images is not None
        chat = chat_prompt(chat_body(body, takes_images=takes_images, seal=processor.chat.seal), processor)
        tokens = processor.chat_tokens(chat, add_special_tokens=False, stages=False)
    except RequestError as error:
        raise renamed(error, NAMES) from None
    return {"input_tokens": len(tokens["prompt_token_ids"])}


def chat_body(body: CountTokensBody, *, takes_images: bool = False, seal: ReasoningSeal | None = None) -> ChatBody:
    """The chat that answers ``body``, for a model that ``takes_images`` or not; raises ``RequestError``.
    ``seal`` opens reasoning; None: sealed reasoning is left out."""
    messages = chat_messages(body.system, body.messages, takes_images=takes_images, seal=seal)
    if not messages:
        raise RequestError("messages have nothing that the model can read; give at least one text", param="messages")
    last = messages[-1]
    if last["role"] == "assistant" and ("tool_calls" in last or not last["content"]):
        raise RequestError(
            "the last message is a call of the assistant; send the tool_result, or end with a message of the user",
            param="messages",
        )
    tools = _tools(_offered(body))
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        **_tool_choice(body.tool_choice, tools),
        "reasoning_effort": _effort(body),
        "response_format": _response_format(body),
        "continue_final_message": True if last["role"] == "assistant" else None,
    }
    shared = {*PromptBody.model_fields, *ThinkingBody.model_fields} - fields.keys()
    if isinstance(body, MessagesBody):
        shared |= {"temperature", "top_p", "top_k"}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    fields |= {name: getattr(body, name) for name in shared}
    try:
        return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise renamed(request_error(error), NAMES) from None


def _offered(body: CountTokensBody) -> list[Tool]:
    """The tools of the body after the additions and removals of its messages, in order."""
    known = {tool.name: tool for tool in body.tools or ()}
    offered = dict(known)
    changes = [
        (f"messages[{number}].content[{place}]", block)
        for number, message in enumerate(body.messages)
        for place, block in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(block, Mapping) and block.get("type") in TOOL_CHANGES
    ]
    for where, block in changes:
        given = block.get("tool")
        if not isinstance(given, Mapping):
            raise RequestError(f"{where}.tool is {shown(given)}; it must be a tool, or name one", param="messages")
        name = str(given.get("name"))
        if block["type"] == "tool_removal":
            offered.pop(name, None)
        elif given.get("type") == "tool_definition":
            try:
                tool = Tool.model_validate(given.get("definition"))
            except ValidationError as error:
                raise RequestError(f"{where}.tool.definition: {request_error(error)}", param="messages") from None
            known[tool.name] = offered[tool.name] = tool
        elif name in known:
            offered[name] = known[name]
    return list(offered.values()) if changes else body.tools or []


def _tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    found = []
    for number, tool in enumerate(tools):
        if (described := client_function(tool)) is not None:
            found.append({"type": "function", "function": described})
            continue
        if tool.type == "function":
            raise RequestError(
                f"tools[{number}] is a function in OpenAI's form; here it is {{'name', 'description', 'input_schema'}}",
                param="tools",
            )
        if tool.type not in (None, "custom"):
            warn_once(logger, "tools of the type %s are left out of messages: this server runs none", shown(tool.type))
            continue
        if not tool.name:
            raise RequestError(f"tools[{number}].name is missing; a function must have one", param="tools")
        if tool.input_schema is None and "parameters" in (tool.model_extra or {}):
            raise RequestError(f"tools[{number}] has parameters; here their name is input_schema", param="tools")
        function: dict[str, Any] = {"name": tool.name, "parameters": {"type": "object", **(tool.input_schema or {})}}
        function |= {name: value for name in ("description", "strict") if (value := getattr(tool, name)) is not None}
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(choice: ToolChoice | None, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    if choice is None or (tools is None and choice.type in ("auto", "none")):
        return {}
    if choice.type == "tool":
        given: Any = {"type": "function", "function": {"name": choice.name or ""}}
    else:
        given = _CHOICES[choice.type]
    return {"tool_choice": given, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _effort(body: CountTokensBody) -> str | None:
    """How much thinking is wanted, in a chat's words."""
    asked = None if body.output_config is None else body.output_config.effort
    return body.reasoning_effort if asked is None else _EFFORTS[asked]


def _response_format(body: CountTokensBody) -> dict[str, Any] | None:
    asked = (body.output_config.format if body.output_config is not None else None) or body.output_format
    if asked is None:
        return None
    schema = asked.get("schema")
    if asked.get("type") != "json_schema" or not isinstance(schema, dict):
        raise RequestError("output_config.format must be {'type': 'json_schema', 'schema': ...}", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _too_long(error: ContextLengthError) -> RequestError:
    """The words by which Claude Code recognises that a conversation is too long, or ``max_tokens`` too large."""
    if error.num_asked is None or error.num_prompt >= error.longest:
        text = f"prompt is too long: {error.num_prompt} tokens > {error.longest - 1} maximum"
    else:
        text = (
            f"input length and `max_tokens` exceed context limit: {error.num_prompt} + {error.num_asked} > "
            f"{error.longest}, decrease input length or `max_tokens` and try again"
        )
    return RequestError(text, param=error.param, code=error.code)
