"""From what a user asks to a checked ``EngineRequest``: what is wrong with it is found here, before it is sent."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tp_engine.api.chat import render_chat
from tp_engine.api.tokenizer_loading import load_tokenizer
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import RequestError
from tp_engine.request import EngineRequest
from tp_engine.sampling_params import SamplingParams

__all__ = ["InputProcessor", "Prompt", "load_tokenizer", "prompt_text"]

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Tokenizes and checks.  ``tokenizer`` None serves token ids only.  Safe to call from several threads."""

    def __init__(self, model_info: ModelInfo, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._model = model_info

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> EngineRequest:
        """A request that the engine can serve; raises ``RequestError`` with the reason for one that it can not.

        A prompt is text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.  ``max_tokens``
        None becomes what the model's context leaves.  ``arrival_s`` (time.monotonic()) is now unless given.
        """
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        self._check_params(params)
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise RequestError(f"priority is {priority!r}; it must be a whole number of 32 bits", param="priority")
        token_ids = self._token_ids(prompt)
        self._check_length(len(token_ids), params)
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=self._model.max_model_len - len(token_ids))
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._model.eos_token_ids,
            priority=priority,
            arrival_s=arrival_s,
        )

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """The prompt of a conversation, ready for the assistant's answer.

        ``template_options`` go to the chat template (``enable_thinking=False``); ``continue_final_message=True`` lets
        the model continue the last message instead.
        """
        # The template writes the special tokens itself.
        return self._encode(render_chat(self.tokenizer, messages, template_options), add_special_tokens=False)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = _only_entry(prompt)
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"the prompt is of type {type(prompt).__name__}; it must be text or a list of token ids", param="prompt"
            )
        self._check_token_ids(prompt)
        return list(prompt)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; send the prompt as a list of token ids", param="prompt")
        check_text("prompt", text)
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._check_token_ids(token_ids)
        return token_ids

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if set(map(type, token_ids)) != {int}:  # a bool is no token id either
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise RequestError(f"the prompt contains {wrong!r}; token ids are whole numbers", param="prompt")
        last = self._model.vocab_size - 1
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id <= last:
                raise RequestError(
                    f"the prompt contains the token id {token_id}; the model's token ids are 0 to {last}",
                    param="prompt",
                )

    def _check_length(self, num_tokens: int, params: SamplingParams) -> None:
        longest = self._model.max_model_len
        if num_tokens >= longest:
            raise RequestError(
                f"This model's maximum context length is {longest} tokens. However, your prompt has {num_tokens} "
                f"tokens, and at least one is generated. Please reduce the length of the prompt to at most "
                f"{longest - 1} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.min_tokens > longest - num_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; after a prompt of {num_tokens} tokens the model's context of "
                f"{longest} leaves {longest - num_tokens}",
                param="min_tokens",
                code="context_length_exceeded",
            )

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._model.vocab_size)
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if value is not None and value > self._model.max_logprobs:
                raise RequestError(
                    f"{name} is {value}; this engine gives at most {self._model.max_logprobs}", param=name
                )
        for text in params.stop:
            check_text("stop", text)
        if params.cache_salt is not None:
            check_text("cache_salt", params.cache_salt)


def prompt_text(prompt: Prompt) -> str | None:
    """The prompt's text, where it came as text."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", ())
    return prompt if isinstance(prompt, str) else None


def check_text(name: str, text: object) -> None:
    """Refuse what is no text, and lone surrogates, which JSON can bring but no encoding can write."""
    try:
        if not isinstance(text, str):
            raise RequestError(f"{name} is of type {type(text).__name__}; it must be text", param=name)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has half a surrogate pair at character {error.start}; it must be valid Unicode", param=name
        ) from error


def _only_entry(prompt: Mapping[str, Any]) -> Any:
    given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1 or prompt.keys() - {"prompt", "prompt_token_ids"}:
        raise RequestError(
            f"the prompt has the keys {sorted(map(str, prompt))}; give either 'prompt' or 'prompt_token_ids'",
            param="prompt",
        )
    return prompt[given[0]]
