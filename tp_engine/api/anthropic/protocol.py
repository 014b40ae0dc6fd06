"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, and the form of errors there.

Fields that change nothing here (``metadata``, ``context_management``, ``service_tier``, ...) are ignored.
"""

from typing import Any, Literal

from pydantic import Field

from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.errors import ERROR_TYPES
from tp_engine.api.openai.protocol import PromptBody, RequestBody, ThinkingBody

Block = dict[str, Any]

# Statuses for which Anthropic's words are not OpenAI's.
_ERROR_TYPES = {**ERROR_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class Message(RequestBody):
    """One turn; a text is one block.  ``messages.py`` reads the blocks.

    ``clear_at``: whether a system message, which may have no content, is shown only until the next message of the
    user, or always.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None


class Tool(RequestBody):
    """A function that the client runs, or, by its ``type``, a tool that only Anthropic's servers can run.

    Toolsets of those servers have no name.
    """

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(RequestBody):
    """Whether the model calls tools; ``any``: at least one, ``tool``: the one with ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(RequestBody):
    """How much the model thinks, and the JSON schema of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(ThinkingBody, PromptBody):
    """``POST /v1/messages/count_tokens``: what decides the prompt."""

    foreign = foreign_fields.COUNTED_MESSAGES

    messages: list[Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """``POST /v1/messages``."""

    foreign = foreign_fields.MESSAGES

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of an answer with ``status``, in the form of the Messages API."""
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, "api_error"), "message": message}}
