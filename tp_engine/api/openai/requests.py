"""From an OpenAI body to engine requests, for the server and the batch job: template, tokenize, check."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tp_engine.api.beam_search import BeamSearch, one_token
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.answer_shape import AnswerShape, JsonObject
from tp_engine.api.openai.chat.body import chat_parsing, chat_prompt, parsed_params
from tp_engine.api.openai.chat_events import ChatEventWriter
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.sampling import (
    beam_search_params,
    chat_params,
    completion_params,
    fields_of,
    listed_prompts,
    max_output_tokens,
    num_top_logprobs,
)
from tp_engine.api.openai.structured import named_refusal
from tp_engine.errors import ContextLengthError, RequestError
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams

# Log-probabilities of prompts in one answer; each takes about 70 bytes in it, and 150 while it is made.
MAX_PROMPT_LOGPROBS = 1 << 20
# Rough sizes in an answer: of a log-probability, of a number in a vector, of a token's text or id.
_BYTES_PER_LOGPROB, _BYTES_PER_NUMBER, _BYTES_PER_TOKEN = 64, 20, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBody:
    """The prompts of one body, checked, and the function that turns their outputs into the whole answer.

    Each of ``requests`` is a prompt; a body with ``use_beam_search`` has ``searches`` instead.  ``named`` adds to an
    engine's error the name of the body's field that caused it.
    """

    requests: list[EngineRequest] = field(default_factory=list)
    searches: list[BeamSearch] = field(default_factory=list)
    answer: Callable[[Sequence[RequestOutput]], JsonObject]
    named: Callable[[RequestError], RequestError] = lambda error: error

    def answer_bytes(self, outputs: Sequence[RequestOutput]) -> int:
        """The rough size of the answer, without making it."""
        size = 0
        requests = self.requests or [search.request for search in self.searches]
        for request, output in zip(requests, outputs, strict=True):
            params, num_prompt = request.params, len(output.prompt_token_ids)
            num_tokens = [len(choice.token_ids) for choice in output.outputs]
            size += _BYTES_PER_TOKEN * (num_prompt * len(num_tokens) + sum(num_tokens))
            size += _BYTES_PER_LOGPROB * num_prompt * len(num_tokens) * _num_per_token(params.prompt_logprobs)
            size += _BYTES_PER_LOGPROB * sum(num_tokens) * _num_per_token(params.logprobs)
            size += 0 if output.pooled is None else _BYTES_PER_NUMBER * output.pooled.size
        return size


def _num_per_token(num_alternatives: int | None) -> int:
    return 0 if num_alternatives is None else num_alternatives + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer(PreparedBody):
    """A completion or a chat, with what its stream needs; ``echoes`` are prompts to repeat, if any."""

    body: ChatBody | CompletionBody
    shape: AnswerShape
    echoes: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFromChat(PreparedBody):
    """The checked chat that answers a body of another API, and what turns its choices into that API's events."""

    chat: PreparedAnswer
    new_writer: Callable[[], ChatEventWriter]


def default_model_name(model: str) -> str:
    """The default name of ``model`` for clients: the folder's own name, or the hub name."""
    folder = Path(model)
    return folder.name if folder.is_dir() else model


def prepare(
    body: ChatBody | CompletionBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedAnswer:
    """Check all that can be checked without the engine; raises ``RequestError``.

    ``defaults`` are the model's own sampling parameters, for fields that the request does not set.
    """
    arrival_s = time.monotonic()
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available in streams; leave stream out", param="prompt_logprobs")
    if body.use_beam_search:  # the model's sampling parameters do not matter
        return _prepare_searches(body, processor, model, arrival_s)
    params = chat_params(body, defaults) if isinstance(body, ChatBody) else completion_params(body, defaults)
    shape, prompts, echoes = _inputs(body, processor, model, constrained=params.structured_outputs is not None)
    try:
        params = parsed_params(params, shape.parsing, processor)
        requests = [
            _engine_request(
                body, processor, prompt, params, request_id=_engine_id(shape, number), arrival_s=arrival_s, name=name
            )
            for number, (name, prompt) in enumerate(_named(body, prompts))
        ]
    except RequestError as error:
        raise named_refusal(error, body) from None
    _check_prompt_logprobs(body, requests)
    if num_image_tokens := sum(image.num_tokens for one in requests for image in one.images):
        shape = replace(shape, num_image_tokens=num_image_tokens)
    if shape.kind == "completion" and shape.num_top_logprobs is not None:
        decoder = processor.tokenizer
        firsts = ("" if decoder is None else decoder.decode(one.prompt_token_ids[:1]) for one in requests)
        shape = replace(shape, special_ids=processor.special_ids, first_texts=tuple(firsts))
    if echoes is not None and shape.kind == "completion" and body.truncate_prompt_tokens is not None:
        assert processor.tokenizer is not None, "an echo needs one"
        echoes = [processor.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=True) for one in requests]
    return PreparedAnswer(
        body=body,
        shape=shape,
        echoes=echoes,
        requests=requests,
        answer=partial(shape.answer, echoes=echoes),
        named=partial(named_refusal, body=body),
    )


def _check_prompt_logprobs(body: ChatBody | CompletionBody, requests: Sequence[EngineRequest]) -> None:
    """Refuse an answer of hundreds of megabytes, which would take gigabytes to make."""
    num_all = sum(
        one.params.n * len(one.prompt_token_ids) * _num_per_token(one.params.prompt_logprobs) for one in requests
    )
    if num_all > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the answer would have {num_all} log-probabilities of prompts; at most {MAX_PROMPT_LOGPROBS} are given at "
            "a time: ask for fewer alternatives, or send fewer prompts in a request",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )


def _prepare_searches(
    body: ChatBody | CompletionBody, processor: InputProcessor, model: str, arrival_s: float
) -> PreparedAnswer:
    params = beam_search_params(body, processor.max_model_len)
    shape, prompts, echoes = _inputs(body, processor, model)
    fields = {"logprobs": num_top_logprobs(body), "cache_salt": body.cache_salt}
    if body.skip_special_tokens is not None:
        fields["skip_special_tokens"] = body.skip_special_tokens
    one, searches = one_token(params, **fields), []
    for number, (name, prompt) in enumerate(_named(body, prompts)):
        request_id = _engine_id(shape, number)
        request = _engine_request(body, processor, prompt, one, request_id=request_id, arrival_s=arrival_s, name=name)
        searches.append(BeamSearch(request, params, processor.model, n=shape.num_per_prompt))
    answer = partial(shape.answer, echoes=echoes)
    return PreparedAnswer(body=body, shape=shape, echoes=echoes, searches=searches, answer=answer)


def _named(body: ChatBody | CompletionBody, prompts: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each prompt, with the client's name for it: ``prompt[3]`` for one of several."""
    name = "messages" if isinstance(body, ChatBody) else "prompt"
    return [(f"{name}[{number}]" if len(prompts) > 1 else name, one) for number, one in enumerate(prompts)]


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
    name: str,
) -> EngineRequest:
    """One checked request, whose prompt errors call ``name``.  ``max_tokens`` is a limit, before which the context may
    be full; only more than the whole context is refused, as in vLLM."""
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
            prompt_field=name,
        )
        asked, longest = max_output_tokens(body), processor.max_model_len
        if asked is not None and asked > longest:
            raise ContextLengthError(
                f"max_tokens is {asked}; this model's maximum context length is {longest} tokens, prompt and answer "
                f"together. Leave max_tokens out, or set at most {longest}.",
                param="max_tokens",
                num_prompt=len(request.prompt_token_ids),
                num_asked=asked,
                longest=longest,
            )
    return request


def _inputs(
    body: ChatBody | CompletionBody, processor: InputProcessor, model: str, *, constrained: bool = False
) -> tuple[AnswerShape, list[Any], list[str] | None]:
    """The shape of the answer, the prompts, and the texts to repeat before the answers."""
    shape = AnswerShape.of(body, model)
    if not isinstance(body, ChatBody):
        prompts: list[Any] = listed_prompts("prompt", body.prompt)
        if not body.echo:
            return shape, prompts, None
        if processor.tokenizer is None:
            raise RequestError("echo needs a tokenizer, which this model does not have", param="echo")
        decode = processor.tokenizer.decode
        return shape, prompts, [one if isinstance(one, str) else decode(one) for one in prompts]
    prompt = chat_prompt(body, processor)
    if prompt.images and body.use_beam_search:
        raise RequestError("beam search of a prompt with images is not served; leave images out", param="messages")
    if prompt.images and body.truncate_prompt_tokens is not None:
        raise RequestError("truncate_prompt_tokens would cut images; leave it out", param="truncate_prompt_tokens")
    parsing = chat_parsing(body, prompt, processor, constrained=constrained)
    shape = replace(shape, role=prompt.role, parsing=parsing)
    tokens = processor.chat_tokens(
        prompt, add_special_tokens=bool(body.add_special_tokens), must_fit=body.truncate_prompt_tokens is None
    )
    return shape, [tokens], [prompt.last_text] if body.echo else None
