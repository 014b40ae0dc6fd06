"""What the engine would get for a body, without running it, and the tokenizer's configuration; in vLLM's forms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.requests import prepare
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import count_tokens
from tp_engine.errors import RequestError
from tp_engine.images.sources import has_image_part
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams

# Fields with the place of a tokenizer on this host.
_PLACES = ("name_or_path", "_file")


def rendered(
    body: ChatBody | CompletionBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any]
) -> JsonObject | list[JsonObject]:
    """The prompt of a chat, or those of a completion: token ids, their text, and the sampling parameters that
    are not the default ones.  Raises ``RequestError`` as a request does."""
    if body.use_beam_search:
        raise RequestError("a beam search is not rendered; leave use_beam_search out", param="use_beam_search")
    if isinstance(body, ChatBody) and has_image_part(body.messages):
        raise RequestError("prompts with images are not rendered; send texts, or ask /tokenize", param="messages")
    requests = prepare(body, processor, model, defaults).requests
    found = [_described(body, request, processor, model) for request in requests]
    return found[0] if isinstance(body, ChatBody) else found


def _described(
    body: ChatBody | CompletionBody, request: EngineRequest, processor: InputProcessor, model: str
) -> JsonObject:
    plain = SamplingParams()
    given = {
        spec.name: value
        for spec in dataclasses.fields(plain)
        if (value := getattr(request.params, spec.name)) != getattr(plain, spec.name)
    }
    if request.params.structured_outputs is not None:
        given["structured_outputs"] = dataclasses.asdict(request.params.structured_outputs)
    decoder = processor.tokenizer
    return {
        "request_id": request.request_id,
        "token_ids": request.prompt_token_ids,
        "prompt_text": None if decoder is None else decoder.decode(request.prompt_token_ids),
        "features": None,
        "sampling_params": given,
        "model": model,
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }


def input_tokens(body: ResponsesBody, processor: InputProcessor) -> JsonObject:
    """The answer of ``POST /v1/responses/input_tokens``."""
    return {"object": "response.input_tokens", "input_tokens": count_tokens(body, processor)}


def tokenizer_info(processor: InputProcessor) -> JsonObject:
    """The content of tokenizer_config.json, without places on this host; raises ``RequestError``."""
    tokenizer = processor.tokenizer
    if tokenizer is None:
        raise RequestError("the model has no tokenizer", param="model")
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if not str(name).endswith(_PLACES)}
    settings |= {"tokenizer_class": type(tokenizer).__name__, "chat_template": tokenizer.chat_template}
    found: JsonObject = json.loads(json.dumps(settings, default=_plain))
    return found


def _plain(value: Any) -> Any:
    """An added token, as in its file; the text of anything else that JSON cannot hold."""
    state: Any = getattr(value, "__getstate__", dict)()
    return state if isinstance(state, dict) and "content" in state else str(value)
