"""The body of ``POST /v1/responses``.

The server stores nothing between requests, so it refuses by name fields that refer to something stored.  It accepts
``store``, because clients send ``true`` by default, and answers with ``false``.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.protocol import GenerationBody, RequestBody, ThinkingBody
from tp_engine.errors import RequestError, shown

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_SEALED = "reasoning.encrypted_content"

_NOT_STORED = "this server stores no conversations; send all items as input"
# Fields that this server does not support, and what to do instead.
_REFUSED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "background": "this server answers at once; leave background out, and use stream for long answers",
    "prompt": "this server stores no prompt templates; send the text as input and instructions",
    "use_beam_search": "beam search is served at /v1/chat/completions",
    "prompt_logprobs": "prompt_logprobs are served at /v1/completions",
}
_TRUNCATIONS = ("disabled", "auto")  # both refuse an input that does not fit: nothing is lost silently


class TextOptions(RequestBody):
    """The form of the answer; ``format`` is text, json_object or json_schema."""

    model_config = ConfigDict(extra="ignore")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(ThinkingBody, GenerationBody):
    """``POST /v1/responses``, with the sampling fields of the other endpoints as extras."""

    foreign = foreign_fields.RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    truncation: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return INCLUDE_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_sealed(self) -> bool:
        """Whether reasoning also comes sealed, for a client that sends it back."""
        return INCLUDE_SEALED in (self.include or ())

    @property
    def summary(self) -> str | None:
        """The kind of the summary of reasoning that is asked for."""
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary


def check_responses_body(body: ResponsesBody) -> None:
    """Raise ``RequestError`` for fields that are valid but not supported."""
    for name, remedy in _REFUSED.items():
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} is not supported: {remedy}", param=name)
    if body.n not in (None, 1):
        raise RequestError(f"n is {body.n}; a response has one answer, use /v1/chat/completions for more", param="n")
    if body.truncation not in (None, *_TRUNCATIONS):
        raise RequestError(
            f"truncation is {shown(body.truncation, 40)}; it must be one of {', '.join(_TRUNCATIONS)}",
            param="truncation",
        )
