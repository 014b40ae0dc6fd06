"""From an OpenAI request body to prompts and ``SamplingParams``; fields without support are refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tp_engine.api.openai.errors import renamed
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, GenerationBody
from tp_engine.api.openai.structured import constraining_field, structured_outputs_of
from tp_engine.api.openai.tools.forced_constraint import forced_schema
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.errors import RequestError
from tp_engine.requests.sampling_params import BeamSearchParams, SamplingParams

SAMPLING_NAMES = frozenset(spec.name for spec in dataclasses.fields(SamplingParams))
_CONVERTED = {"logprobs", "max_tokens", "logit_bias", "structured_outputs"}
# These would change log-probabilities or the end of a beam.  Fields for random draws (top_p, seed) change nothing.
_NOT_IN_BEAM_SEARCH = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
)


# Fields of vLLM that would change answers if ignored: their neutral values, and what to do instead.
_NOT_HERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "put the text into the prompt"),
    "logprob_token_ids": (
        (None, []),
        "ask for logprobs -1 of a server with --max-logprobs -1, and read those of the tokens",
    ),
    "thinking_token_budget": ((None, -1), "limit the whole answer with max_tokens, or set reasoning_effort"),
}


def completion_params(body: CompletionBody, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling of a completion; ``defaults`` (the model's own) are for fields that the request does not set."""
    _refuse_what_is_not_here(body)
    echoes_logprobs = body.echo and body.logprobs is not None
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens is 0; it must be at least 1, except with echo", param="max_tokens")
    if body.mm_processor_kwargs:
        raise RequestError(
            "mm_processor_kwargs are sizes of images, which completions do not take; send a chat",
            param="mm_processor_kwargs",
        )
    if body.best_of not in (None, body.n or 1):
        raise RequestError(f"best_of is {body.best_of}; only best_of equal to n is supported", param="best_of")
    given = _given(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    if echoes_logprobs and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    # An engine generates at least one token; an answer that is the prompt alone leaves it out.
    asked = SamplingParams().max_tokens if body.max_tokens is None else body.max_tokens or 1
    return SamplingParams(**_limited(given, asked, defaults or {}))


def chat_params(body: ChatBody, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling of a chat; without ``max_tokens`` the answer may fill the rest of the context."""
    _refuse_what_is_not_here(body)
    tools = ToolRequest.of(body)
    given = _given(body)
    if tools is not None and (constraint := forced_schema(tools)) is not None:
        if body.response_format is None and "structured_outputs" in given:
            raise RequestError(
                f"tool_choice forces a call, and {constraining_field(body)} another form; leave one of them out",
                param="tool_choice",
            )
        given["structured_outputs"] = constraint
    if (num_logprobs := num_top_logprobs(body)) is not None:
        given["logprobs"] = num_logprobs
    with fields_of(body):
        return SamplingParams(**_limited(given, max_output_tokens(body), defaults or {}))


@contextlib.contextmanager
def fields_of(body: CompletionBody | ChatBody) -> Iterator[None]:
    """Within, errors about ``SamplingParams`` name a chat's fields."""
    sent = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"} if isinstance(body, ChatBody) else {}
    try:
        yield
    except RequestError as error:
        names = {ours: theirs for ours, theirs in sent.items() if getattr(body, theirs) is not None}
        raise renamed(error, names) from None


def beam_search_params(body: CompletionBody | ChatBody, context_tokens: int) -> BeamSearchParams:
    """The search of a body with ``use_beam_search``; a chat without a limit may use ``context_tokens``.

    Its width is ``best_of``, or ``n`` if that is not set; the ``n`` best beams are the answer.
    """
    _refuse_in_beam_search(body)
    _refuse_what_is_not_here(body)
    width = n = 1 if body.n is None else body.n
    if isinstance(body, ChatBody):
        tools = ToolRequest.of(body)
        if tools is not None and tools.choice != "auto":
            raise RequestError("tool_choice is not supported with use_beam_search; leave it out", param="tool_choice")
        limit = max_output_tokens(body)
    else:
        if body.echo and body.logprobs is not None:
            raise RequestError("echo with logprobs is not supported with use_beam_search", param="echo")
        width = n if body.best_of is None else body.best_of
        limit = SamplingParams().max_tokens if body.max_tokens is None else body.max_tokens
    if not 1 <= n <= width:
        raise RequestError(f"n is {n}; it must be from 1 to the number of beams, {width}", param="n")
    names = ("ignore_eos", "temperature", "length_penalty", "include_stop_str_in_output")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return BeamSearchParams(beam_width=width, max_tokens=context_tokens if limit is None else limit, **given)


def max_output_tokens(body: CompletionBody | ChatBody) -> int | None:
    """The limit on the answer that the body itself sets."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if newer is None else newer


def num_top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Alternatives per generated token; None if the body asks for no log-probabilities."""
    if not isinstance(body, ChatBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def listed_prompts(param: str, given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Each prompt of the field ``param``, text or token ids; raises ``RequestError`` for an empty list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError(f"{param} is an empty list; give text, token ids, or a list of either", param=param)
    if isinstance(given[0], int):
        return [given]  # a list whose first element is an id has only ids
    return list(given)


def _given(body: GenerationBody) -> dict[str, Any]:
    """The sampling fields that the request sets, under the names of ``SamplingParams``."""
    names = (SAMPLING_NAMES - _CONVERTED) & type(body).model_fields.keys()
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if (structured := structured_outputs_of(body)) is not None:
        given["structured_outputs"] = structured
    return given


def _limited(given: dict[str, Any], asked: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All fields; a default of ``max_tokens`` also limits requests that ask for more."""
    limits = [limit for limit in (asked, defaults.get("max_tokens")) if limit is not None]
    return {**defaults, **given, "max_tokens": min(limits, default=None)}


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"logit_bias has the key {text[:40]!r}; keys must be token ids", param="logit_bias")
    return int(text)


def _refuse_in_beam_search(body: GenerationBody) -> None:
    if body.stream:
        raise RequestError("a beam search has no answer before its end; leave stream out", param="stream")
    neutral = SamplingParams()
    for name in _NOT_IN_BEAM_SEARCH:
        value = getattr(body, name)
        if value is not None and value not in ([], {}, "", getattr(neutral, name)):
            raise RequestError(f"{name} is not supported with use_beam_search; leave it out", param=name)
    if isinstance(body, ChatBody) and body.budget is not None:
        raise RequestError("a budget of thinking is not supported with use_beam_search; leave it out", param="thinking")
    if structured_outputs_of(body) is not None:
        raise RequestError(
            "structured output is not supported with use_beam_search; leave one of them out", param="use_beam_search"
        )


def _refuse_what_is_not_here(body: GenerationBody) -> None:
    for name, (neutral, remedy) in _NOT_HERE.items():
        value = getattr(body, name, None)
        if name == "thinking_token_budget" and isinstance(body, ChatBody):
            continue
        if value not in neutral:
            raise RequestError(f"{name} is not supported; {remedy}", param=name)
