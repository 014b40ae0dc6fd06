"""From an OpenAI body to engine requests, for the server and the batch job: template, tokenize, check."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_engine.api.beam_search import BeamSearch, one_token
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.answer_shape import AnswerShape, JsonObject
from tp_engine.api.openai.chat.body import chat_parsing, chat_prompt, parsed_params
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.sampling import (
    beam_search_params,
    chat_params,
    completion_params,
    completion_prompts,
    fields_of,
    max_output_tokens,
    num_top_logprobs,
)
from tp_engine.api.openai.structured import named_refusal
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSearches:
    """One beam search per prompt; otherwise as ``PreparedAnswer``."""

    shape: AnswerShape
    searches: list[BeamSearch]
    echoes: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer:
    """One engine request per prompt, and the shape of the answer; ``echoes`` are prompts to repeat, if any."""

    body: ChatBody | CompletionBody
    shape: AnswerShape
    requests: list[EngineRequest]
    echoes: list[str] | None = None

    def named(self, error: RequestError) -> RequestError:
        """An error of the engine, with the name of the body's field that caused it."""
        return named_refusal(error, self.body)

    def answer(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The whole answer; ``outputs`` has one element per prompt."""
        return self.shape.answer(outputs, self.echoes)


def default_model_name(model: str) -> str:
    """The default name of ``model`` for clients: the folder's own name, or the hub name."""
    folder = Path(model)
    return folder.name if folder.is_dir() else model


def num_prompts(body: ChatBody | CompletionBody) -> int:
    """The number of engine requests that ``prepare`` makes of ``body``."""
    return 1 if isinstance(body, ChatBody) else len(completion_prompts(body))


def prepare(
    body: ChatBody | CompletionBody,
    processor: InputProcessor,
    model: str,
    defaults: Mapping[str, Any] | None = None,
) -> PreparedAnswer:
    """Check all that can be checked without the engine; raises ``RequestError``.

    ``defaults`` are the model's own sampling parameters, for fields that the request does not set.
    """
    arrival_s = time.monotonic()
    _check_stream(body)
    params = chat_params(body, defaults) if isinstance(body, ChatBody) else completion_params(body, defaults)
    shape, prompts, echoes = _inputs(body, processor, model, constrained=params.structured_outputs is not None)
    try:
        params = parsed_params(params, shape.parsing, processor)
        requests = [
            _engine_request(body, processor, prompt, params, request_id=_engine_id(shape, number), arrival_s=arrival_s)
            for number, prompt in enumerate(prompts)
        ]
    except RequestError as error:
        raise named_refusal(error, body) from None
    if shape.kind == "completion" and shape.num_top_logprobs is not None:
        shape = replace(shape, special_ids=processor.special_ids, first_texts=_first_texts(requests, processor))
    if echoes is not None and shape.kind == "completion" and body.truncate_prompt_tokens is not None:
        echoes = _texts_read(requests, processor)
    return PreparedAnswer(body=body, shape=shape, requests=requests, echoes=echoes)


def prepare_searches(
    body: ChatBody | CompletionBody, processor: InputProcessor, engine: ModelInfo, model: str
) -> PreparedSearches:
    """As ``prepare``, for a body with ``use_beam_search``; the model's own sampling parameters do not matter."""
    arrival_s = time.monotonic()
    _check_stream(body)
    params = beam_search_params(body, engine.max_model_len)
    shape, prompts, echoes = _inputs(body, processor, model)
    fields = {"logprobs": num_top_logprobs(body), "cache_salt": body.cache_salt}
    if body.skip_special_tokens is not None:
        fields["skip_special_tokens"] = body.skip_special_tokens
    searches = []
    for number, prompt in enumerate(prompts):
        one = one_token(params, **fields)
        request = _engine_request(
            body, processor, prompt, one, request_id=_engine_id(shape, number), arrival_s=arrival_s
        )
        searches.append(BeamSearch(request, params, engine))
    return PreparedSearches(shape=shape, searches=searches, echoes=echoes)


def _texts_read(requests: Sequence[EngineRequest], processor: InputProcessor) -> list[str]:
    """What the model reads of each prompt."""
    assert processor.tokenizer is not None, "an echo needs one"
    return [processor.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=True) for one in requests]


def _first_texts(requests: Sequence[EngineRequest], processor: InputProcessor) -> tuple[str, ...]:
    if processor.tokenizer is None:
        return tuple("" for _ in requests)
    return tuple(processor.tokenizer.decode(request.prompt_token_ids[:1]) for request in requests)


def _check_stream(body: ChatBody | CompletionBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available in streams; leave stream out", param="prompt_logprobs")


def _engine_id(shape: AnswerShape, number: int) -> str:
    """A unique id: clients choose the ids of their requests and may repeat them."""
    return f"{shape.response_id}-{number}-{uuid.uuid4().hex[:12]}"


def _engine_request(
    body: ChatBody | CompletionBody,
    processor: InputProcessor,
    prompt: Any,
    params: SamplingParams,
    *,
    request_id: str,
    arrival_s: float,
) -> EngineRequest:
    """One checked request; refuses a ``max_tokens`` that the context can not hold, which ``LLM`` would reduce."""
    with fields_of(body):
        request = processor.process(
            prompt,
            params,
            request_id=request_id,
            priority=body.priority or 0,
            arrival_s=arrival_s,
            add_special_tokens=body.add_special_tokens is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
            adapter=body.model if body.model in processor.adapters else "",
            prompt_field="messages" if isinstance(body, ChatBody) else "prompt",
        )
        asked, num_prompt, longest = max_output_tokens(body), len(request.prompt_token_ids), processor.max_model_len
        if asked is not None and num_prompt + asked > longest:
            raise RequestError(
                f"This model's maximum context length is {longest} tokens. However, you requested {num_prompt + asked} "
                f"tokens ({num_prompt} in the prompt, {asked} in the completion). Please reduce the length of the "
                f"prompt or max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
    return request


def _inputs(
    body: ChatBody | CompletionBody, processor: InputProcessor, model: str, *, constrained: bool = False
) -> tuple[AnswerShape, list[Any], list[str] | None]:
    """The shape of the answer, the prompts, and the texts to repeat before the answers."""
    shape = AnswerShape.of(body, model)
    if not isinstance(body, ChatBody):
        prompts = list(completion_prompts(body))
        return shape, prompts, _echoes(body, prompts, processor)
    prompt = chat_prompt(body, processor)
    parsing = chat_parsing(body, prompt, processor, constrained=constrained)
    shape = dataclasses.replace(shape, role=prompt.role, parsing=parsing)
    token_ids = processor.text_token_ids(
        prompt.text,
        add_special_tokens=bool(body.add_special_tokens),
        must_fit=body.truncate_prompt_tokens is None,
        param="messages",
    )
    return shape, [{"prompt_token_ids": token_ids}], [prompt.last_text] if body.echo else None


def _echoes(body: CompletionBody, prompts: Sequence[Any], processor: InputProcessor) -> list[str] | None:
    if not body.echo:
        return None
    if processor.tokenizer is None:
        raise RequestError("echo needs a tokenizer, which this model does not have", param="echo")
    return [prompt if isinstance(prompt, str) else processor.tokenizer.decode(prompt) for prompt in prompts]
