"""From an OpenAI request body to prompts and ``SamplingParams``; what can not be honoured is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tp_engine.api.openai_protocol import ChatBody, CompletionBody, GenerationBody
from tp_engine.errors import RequestError
from tp_engine.sampling_params import SamplingParams

SAMPLING_NAMES = frozenset(spec.name for spec in dataclasses.fields(SamplingParams))
_CONVERTED = {"logprobs", "max_tokens", "logit_bias"}


def completion_params(body: CompletionBody, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling of a completion; ``defaults`` (the model's own) fill what the request leaves open."""
    if body.suffix:
        raise RequestError("suffix is not supported; put the text into the prompt", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise RequestError(f"best_of is {body.best_of}; only best_of equal to n is supported", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported; ask for prompt_logprobs instead", param="echo")
    given = _given(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    if body.max_tokens is not None:
        given["max_tokens"] = body.max_tokens
    return SamplingParams(**{**(defaults or {}), **given})


def chat_params(body: ChatBody, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling of a chat; without ``max_tokens`` the answer may fill the remaining context."""
    _refuse_tools_and_formats(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    given = _given(body)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    given["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(**{**(defaults or {}), **given})


def completion_prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion, one element per prompt, each text or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; give text, token ids, or a list of either", param="prompt")
    if isinstance(prompt[0], int):
        return [[int(token_id) for token_id in prompt]]
    return list(prompt)


def _given(body: GenerationBody) -> dict[str, Any]:
    """The sampling fields that the request set, under the names of ``SamplingParams``."""
    names = (SAMPLING_NAMES - _CONVERTED) & type(body).model_fields.keys()
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    return given


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"logit_bias has the key {text[:40]!r}; keys must be token ids", param="logit_bias")
    return int(text)


def _refuse_tools_and_formats(body: ChatBody) -> None:
    if body.functions or (body.tools and body.tool_choice != "none"):
        raise RequestError("tools are not supported by this server", param="functions" if body.functions else "tools")
    wanted = (body.response_format or {}).get("type", "text")
    if wanted != "text":
        raise RequestError(f"response_format {wanted!r} is not supported; only text is", param="response_format")
