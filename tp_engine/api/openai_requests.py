"""From an OpenAI body to engine requests: template, tokenize, check.  The server and the batch job share this way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.api.beam_search import BeamSearch, one_token
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai_protocol import ChatBody, CompletionBody
from tp_engine.api.openai_responses import AnswerShape
from tp_engine.api.openai_sampling import (
    beam_search_params,
    chat_params,
    completion_params,
    completion_prompts,
    num_top_logprobs,
)
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import RequestError
from tp_engine.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSearches:
    """One beam search per prompt; otherwise as ``PreparedAnswer``."""

    shape: AnswerShape
    searches: list[BeamSearch]
    echoes: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer:
    """One engine request per prompt, and the shape of the answer; ``echoes`` are prompts to repeat, if asked for."""

    shape: AnswerShape
    requests: list[EngineRequest]
    echoes: list[str] | None = None


def default_model_name(model: str) -> str:
    """The name under which clients ask for ``model`` unless another was given: the folder's own, or the hub name."""
    folder = Path(model)
    return folder.name if folder.is_dir() else model


def num_prompts(body: ChatBody | CompletionBody) -> int:
    """How many engine requests ``prepare`` will make of ``body``."""
    return 1 if isinstance(body, ChatBody) else len(completion_prompts(body))


def prepare(
    body: ChatBody | CompletionBody,
    processor: InputProcessor,
    model: str,
    defaults: Mapping[str, Any] | None = None,
) -> PreparedAnswer:
    """Check everything that can be checked without the engine; raises ``RequestError``.

    ``defaults`` are the model's own sampling parameters, for what the request leaves open.
    """
    arrival_s = time.monotonic()
    shape = AnswerShape.of(body, model)
    params = chat_params(body, defaults) if isinstance(body, ChatBody) else completion_params(body, defaults)
    prompts = _prompts(body, processor)
    requests = [
        processor.process(
            prompt,
            params,
            request_id=f"{shape.response_id}-{number}",
            priority=body.priority or 0,
            arrival_s=arrival_s,
        )
        for number, prompt in enumerate(prompts)
    ]
    return PreparedAnswer(shape=shape, requests=requests, echoes=_echoes(body, prompts, processor))


def prepare_searches(
    body: ChatBody | CompletionBody, processor: InputProcessor, engine: ModelInfo, model: str
) -> PreparedSearches:
    """As ``prepare``, for a body with ``use_beam_search``; the model's own sampling parameters have no say in it."""
    arrival_s = time.monotonic()
    shape = AnswerShape.of(body, model)
    params = beam_search_params(body, engine.max_model_len)
    fields = {"logprobs": num_top_logprobs(body), "cache_salt": body.cache_salt}
    if body.skip_special_tokens is not None:
        fields["skip_special_tokens"] = body.skip_special_tokens
    prompts = _prompts(body, processor)
    searches = []
    for number, prompt in enumerate(prompts):
        request = processor.process(
            prompt,
            one_token(params, **fields),
            request_id=f"{shape.response_id}-{number}",
            priority=body.priority or 0,
            arrival_s=arrival_s,
        )
        searches.append(BeamSearch(request, params, engine))
    return PreparedSearches(shape=shape, searches=searches, echoes=_echoes(body, prompts, processor))


def _prompts(body: ChatBody | CompletionBody, processor: InputProcessor) -> list[Any]:
    if isinstance(body, ChatBody):
        return [{"prompt_token_ids": _chat_token_ids(body, processor)}]
    return list(completion_prompts(body))


def _chat_token_ids(body: ChatBody, processor: InputProcessor) -> list[int]:
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if "chat_template" in options:  # a template is a program, and strangers bring none
        raise RequestError("chat_template is not taken from requests", param="chat_template_kwargs")
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    return processor.chat_token_ids(body.messages, **options)


def _echoes(body: ChatBody | CompletionBody, prompts: Sequence[Any], processor: InputProcessor) -> list[str] | None:
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    if processor.tokenizer is None:
        raise RequestError("echo needs a tokenizer, which this model does not have", param="echo")
    return [prompt if isinstance(prompt, str) else processor.tokenizer.decode(prompt) for prompt in prompts]
