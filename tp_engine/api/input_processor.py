"""From a prompt and its parameters to a checked ``EngineRequest``; all user errors are found here."""

import dataclasses
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

from tp_engine.api.image_prompts import ImagePrompts, with_sizes, without_empty_data
from tp_engine.api.openai.chat.prompt import ChatFormat, ChatPrompt
from tp_engine.api.text_measure import TextMeasure
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.tokenizer import load_tokenizer, special_ids, tokenize
from tp_engine.errors import ContextLengthError, RequestError, shown
from tp_engine.features.lora.feature import ADAPTER, AskedAdapter
from tp_engine.features.structured_output.feature import BANNED, BannedWords, check_first_token
from tp_engine.grammar.vocabulary import check_tokenizer
from tp_engine.images.image_input import ImageInput
from tp_engine.options.fields import unboxed
from tp_engine.requests.request import EngineRequest, Pooling
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

__all__ = ["InputProcessor", "Prompt", "load_tokenizer", "prompt_text"]

# Characters; shorter texts are tokenized at once, which gives their exact length.
_LONG_TEXT = 1 << 13
_MAX_REMEMBERED = 16
# Characters or tokens that are read although they may not fit: in total, and per token of the context.  Tokenizers
# take about 200 bytes of memory for each.
_MOST_AT_ONCE = 1 << 20
_PER_TOKEN = 16

# Keys of a prompt that is a mapping.  Others, such as the caller's id, are ignored, as in vLLM.
_CONTENTS = {"prompt", "prompt_token_ids"}
_NOT_SERVED = {"prompt_embeds", "encoder_prompt", "decoder_prompt", "negative_prompt", "data", "multi_modal_uuids"}

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
TruncationSide: TypeAlias = Literal["left", "right"]


class InputProcessor:
    """Tokenizes and checks, for ``model``, from any thread.  ``tokenizer`` None serves token ids only.

    ``chat`` makes the prompts of conversations; replace it to support another chat format.  ``adapters`` are the loaded
    ones, by name: their folders.  ``structured_defaults`` hold for constraints that do not set the same themselves.
    ``images`` reads those of prompts; None: the model is served as text alone.  ``waits_for_images``: requests wait for
    room for their pixels, which other threads make (``ImageReader``).
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: Any | None,
        *,
        waits_for_images: bool = False,
        reads_pixels: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)
        self.model = model_info
        self.adapters = dict(model_info.adapters)
        self.structured_defaults = model_info.structured_outputs
        self.images: ImagePrompts | None = None
        if model_info.images is not None and tokenizer is not None:
            from tp_engine.images.reader import ImageReader  # imports Pillow, which no other model needs

            reader = ImageReader(model_info.images, tokenizer, waits=waits_for_images)
            self.images = ImagePrompts(self, reader, reads_pixels=reads_pixels)
        # All prompts of a request have the same constraint, and checking a large one takes a while.
        self._constraint = lru_cache(maxsize=_MAX_REMEMBERED)(self._complete_constraint)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokenizer's special tokens."""
        return frozenset() if self.tokenizer is None else special_ids(self.tokenizer)

    @cached_property
    def _measure(self) -> TextMeasure:
        return TextMeasure(self.tokenizer)

    def _complete_constraint(self, given: StructuredOutputsParams) -> StructuredOutputsParams:
        """``given`` with the engine's defaults, checked; raises ``RequestError``."""
        check_tokenizer(self.tokenizer)
        given.check_bounds()
        return self.structured_defaults.complete(given)

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a prompt and its output."""
        return self.model.max_model_len

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        arrival_s: float | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
        pooling: Pooling | None = None,
        adapter: str = "",
        prompt_field: str = "prompt",
    ) -> EngineRequest:
        """A request that the engine can serve; raises ``RequestError`` with the reason for any other.

        Only the engine finds out whether a grammar can be used.

        A prompt is text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; these two may also
        have ``multi_modal_data``: ``{"image": one image, or a list}``.  ``max_tokens``
        becomes at most the rest of the model's context.  ``arrival_s`` (time.monotonic()) is now unless given.  Text is
        tokenized with ``add_special_tokens``.  ``truncate_prompt_tokens`` keeps that many of the prompt's last tokens,
        or with ``truncation_side`` right of its first ones; -1 keeps as many as leave room for ``max_tokens``; with
        None ``params`` decide.  A request with ``pooling`` generates nothing.  ``adapter`` names a loaded one.  Errors
        name the prompt ``prompt_field``.
        """
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        if params.structured_outputs is not None:
            params = dataclasses.replace(params, structured_outputs=self._constraint(params.structured_outputs))
        self._check_purpose(pooling)
        self._check_params(params)
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        if names:  # all, as in vLLM
            every: dict[str, Any] = dict.fromkeys(names, self.model.vocab_size)
            params = dataclasses.replace(params, **every)
        if not isinstance(priority, bool) and is_token_id(priority):
            priority = operator.index(priority)  # of numpy, too
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise RequestError(f"priority is {shown(priority)}; it must be a whole number of 32 bits", param="priority")
        if truncate_prompt_tokens is None:
            truncate_prompt_tokens = params.truncate_prompt_tokens
        must_fit = truncate_prompt_tokens is None
        images: tuple[ImageInput, ...] = ()
        if isinstance(prompt, Mapping):
            prompt = without_empty_data(prompt)
        if isinstance(prompt, Mapping) and not {"images", "multi_modal_data"}.isdisjoint(prompt):
            if pooling is not None:
                raise RequestError("vectors and scores are made of text alone; leave images out", param="input")
            if not must_fit:
                param = "truncate_prompt_tokens"
                raise RequestError(f"{param} would cut images; leave it out", param=param)
            prompt, images = self._read_images(prompt, add_special_tokens, prompt_field)
        if isinstance(prompt, Mapping) and (salt := prompt.get("cache_salt")) is not None:
            check_text("cache_salt", salt)
            params = dataclasses.replace(params, cache_salt=salt)
        token_ids = self._token_ids(prompt, add_special_tokens, prompt_field, must_fit)
        if truncate_prompt_tokens is not None:
            num_kept = self._truncation(truncate_prompt_tokens, params, pooling)
            if truncation_side == "left":
                token_ids = token_ids[-num_kept:]
            else:
                keeps_end = add_special_tokens and prompt_text(prompt) is not None
                token_ids = self._first(token_ids, num_kept, keeps_end)
        self.check_length(len(token_ids), params, pooling, prompt_field)
        room = self.model.max_model_len - len(token_ids)
        if params.max_tokens is None or (pooling is None and params.max_tokens > room):
            params = dataclasses.replace(params, max_tokens=room)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.model.eos_token_ids,
            priority=priority,
            arrival_s=arrival_s,
            pooling=pooling,
            extensions=self._extensions(params, adapter),
            prompt_field=prompt_field,
            images=images,
        )
        check_first_token(request, self.model.vocab_size)
        return request

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> Mapping[str, Any]:
        """The prompt of a conversation, up to the assistant's answer, as tokens, with its images.

        ``template_options`` and ``chat_template_kwargs`` go to the chat template (``enable_thinking=False``);
        ``continue_final_message=True`` lets the model continue the last message instead.  Templates write the special
        tokens themselves; ``add_special_tokens`` adds the tokenizer's to them.  ``mm_processor_kwargs`` are the sizes
        of images.
        """
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping):
            kind = type(variables).__name__
            raise RequestError(
                f"chat_template_kwargs is of type {kind}; it must be a mapping", param="chat_template_kwargs"
            )
        if template_options.pop("chat_template_content_format", "auto") != "auto":
            raise RequestError(
                "chat_template_content_format is found in the template; leave it out, or start a server with it",
                param="chat_template_content_format",
            )
        if self.images is not None:
            messages = self.images.with_pages(messages)
        chat = self.chat.render(messages, {**template_options, **variables}, image_marker=self.image_marker)
        chat = dataclasses.replace(chat, images=tuple(with_sizes(chat.images, mm_processor_kwargs)))
        return self.chat_tokens(chat, add_special_tokens=add_special_tokens)

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> list[int]:
        """The tokens of ``chat_prompt``."""
        token_ids: list[int] = self.chat_prompt(messages, **template_options)["prompt_token_ids"]
        return token_ids

    @property
    def image_marker(self) -> str | None:
        """What the chat template writes for an image; None: the model is served as text alone."""
        return None if self.images is None else self.images.marker

    def chat_tokens(
        self, chat: ChatPrompt, *, add_special_tokens: bool, must_fit: bool = False, stages: bool = True
    ) -> Mapping[str, Any]:
        """The tokens of a rendered chat as a prompt, with its images; their pixels only if it ``stages`` them,
        for a request."""
        if chat.images:
            assert self.images is not None, "only then a chat has images"
            return self.images.read(
                chat.images, chat.pieces, add_special_tokens, "messages", must_fit=must_fit, stages=stages
            )
        token_ids = self.text_token_ids(
            chat.text, add_special_tokens=add_special_tokens, must_fit=must_fit, param="messages"
        )
        return {"prompt_token_ids": token_ids}

    def text_token_ids(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        may_be_empty: bool = False,
        must_fit: bool = False,
        param: str = "prompt",
    ) -> list[int]:
        """The token ids of ``text``; raises ``RequestError``, which names the field ``param``.

        A text that ``must_fit`` into the context, and cannot, is refused before it is tokenized; so is one that is
        much longer than texts that fit.
        """
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer; send the prompt as a list of token ids", param=param)
        check_text(param, text)
        if must_fit and len(text) > _LONG_TEXT:
            self._refuse_too_long(text, param)
        self.check_size(param, len(text), "characters")
        token_ids = tokenize(self.tokenizer, text, add_special_tokens=add_special_tokens, param=param)
        if token_ids or not may_be_empty:
            self.check_token_ids(token_ids, param)
        return token_ids

    def pair_token_ids(self, first: str, second: str, *, must_fit: bool, param: str) -> list[int]:
        """The token ids of two texts as the tokenizer writes pairs, with its special tokens; errors are as those
        of ``text_token_ids``."""
        for text in (first, second):  # bounds what is tokenized
            self.text_token_ids(text, add_special_tokens=False, may_be_empty=True, must_fit=must_fit, param=param)
        token_ids = tokenize(self.tokenizer, first, second, add_special_tokens=True, param=param)
        self.check_token_ids(token_ids, param)
        return token_ids

    def check_size(self, param: str, size: int, unit: str) -> None:
        """Raise ``RequestError`` if ``size`` would hold up others: more than fits is legal, but not much more."""
        most = max(_MOST_AT_ONCE, _PER_TOKEN * self.model.max_model_len)
        if size > most:
            raise RequestError(
                f"{param} has {size} {unit}; at most {most} are taken at a time, send it in parts", param=param
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """Raise ``RequestError`` unless these are token ids of the model, at least one."""
        what = f"the {param}" if param == "prompt" else param
        if not token_ids:
            raise RequestError(f"{what} is empty; give at least one token", param=param)
        if set(map(type, token_ids)) != {int}:  # a bool is not a token id either
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise RequestError(f"{what} contains {shown(wrong)}; token ids are whole numbers", param=param)
        last = self.model.vocab_size - 1
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id <= last:
                raise RequestError(
                    f"{what} contains the token id {token_id}; the model's token ids are 0 to {last}", param=param
                )

    def _read_images(
        self, prompt: Mapping[str, Any], add_special_tokens: bool, param: str
    ) -> tuple[Prompt, tuple[ImageInput, ...]]:
        """The prompt as tokens, and its images."""
        salt = prompt.get("cache_salt")
        if "multi_modal_data" in prompt:
            _refuse_unserved(prompt)
            if self.images is None:
                how = "as text alone" if self.model.images is None else "without a tokenizer, which images need"
                raise RequestError(f"this model is served {how}; leave multi_modal_data out", param=param)
            if "prompt_token_ids" in prompt:
                prompt = {**prompt, "prompt_token_ids": plain_token_ids(prompt["prompt_token_ids"])}
            prompt = self.images.of_prompt(prompt, add_special_tokens=add_special_tokens, param=param)
        return {"prompt_token_ids": prompt["prompt_token_ids"], "cache_salt": salt}, tuple(prompt["images"])

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool, param: str, must_fit: bool) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = _only_entry(prompt)
        if isinstance(prompt, str):
            return self.text_token_ids(prompt, add_special_tokens=add_special_tokens, must_fit=must_fit, param=param)
        prompt = plain_token_ids(prompt)
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"the prompt is of type {type(prompt).__name__}; it must be text or a list of token ids", param=param
            )
        if not must_fit or len(prompt) <= self.model.max_model_len:  # else it is refused for its length
            self.check_token_ids(prompt, param)
        return list(prompt)

    def _refuse_too_long(self, text: str, param: str) -> None:
        longest, num_tokens = self.model.max_model_len, self._measure.least_tokens(text)
        if num_tokens > longest:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens. However, your text has at least "
                f"{num_tokens} tokens. Please reduce its length.",
                param=param,
                num_prompt=num_tokens,
                longest=longest,
            )

    def _first(self, token_ids: list[int], num_kept: int, keeps_end: bool) -> list[int]:
        """The first ``num_kept`` tokens; with ``keeps_end`` the special tokens at the end stay, as in transformers."""
        if not keeps_end or len(token_ids) <= num_kept:
            return token_ids[:num_kept]
        num_last = 0
        while num_last < num_kept and token_ids[-1 - num_last] in self.special_ids:
            num_last += 1
        return token_ids[: num_kept - num_last] + token_ids[len(token_ids) - num_last :]

    def _truncation(self, asked: int, params: SamplingParams, pooling: Pooling | None) -> int:
        """How many of the prompt's last tokens are kept, at least one."""
        longest = self.model.max_model_len
        if isinstance(asked, bool) or not isinstance(asked, int) or not (asked == -1 or 1 <= asked <= longest):
            raise RequestError(
                f"truncate_prompt_tokens is {shown(asked)}; it must be -1 (what the context allows) or from 1 to "
                f"{longest}",
                param="truncate_prompt_tokens",
            )
        num_generated = (params.max_tokens or 1) if pooling is None else 0
        return asked if asked > 0 else max(1, longest - num_generated)

    def _extensions(self, params: SamplingParams, adapter: str) -> dict[str, Any]:
        """What features need of a request."""
        found: dict[str, Any] = {ADAPTER.name: AskedAdapter(name=adapter)} if adapter else {}
        if params.bad_words:
            found[BANNED.name] = BannedWords(token_ids=self._banned_words(params.bad_words))
        return found

    def _banned_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens, at the beginning of a text and within it."""
        if words and self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, which this model does not have", param="bad_words")
        for word in words:
            check_text("bad_words", word)
        spaced = (space + word.lstrip() for word in words for space in ("", " "))
        return tuple(dict.fromkeys(map(self._word_ids, spaced)))

    def _word_ids(self, text: str) -> tuple[int, ...]:
        token_ids = tuple(tokenize(self.tokenizer, text, add_special_tokens=False, param="bad_words"))
        if not token_ids or max(token_ids) >= self.model.vocab_size:
            raise RequestError(
                f"bad_words contains {shown(text)}, which the vocabulary of this model cannot write", param="bad_words"
            )
        return token_ids

    def _check_purpose(self, pooling: Pooling | None) -> None:
        if pooling is not None or self.model.generates_text:
            return
        what, path = ("embeddings", "/v1/embeddings") if self.model.convert == "embed" else ("scores", "/classify")
        raise RequestError(
            f"this model is served for {what} and generates no text; send the request to {path}, or serve a model with "
            "an output head with --convert none",
            param="model",
        )

    def check_length(self, num_tokens: int, params: SamplingParams, pooling: Pooling | None, param: str) -> None:
        """Raise ``ContextLengthError`` for a prompt that is too long with these parameters."""
        longest = self.model.max_model_len
        if pooling is not None and num_tokens > longest:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens. However, your input has {num_tokens} "
                f"tokens. Please reduce its length, or set truncate_prompt_tokens to -1.",
                param=param,
                num_prompt=num_tokens,
                longest=longest,
            )
        if pooling is None and num_tokens >= longest:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens. However, your prompt has {num_tokens} "
                f"tokens, and at least one is generated. Please reduce the length of the prompt to at most "
                f"{longest - 1} tokens.",
                param=param,
                num_prompt=num_tokens,
                longest=longest,
            )
        if params.min_tokens > longest - num_tokens:
            raise ContextLengthError(
                f"min_tokens is {params.min_tokens}; after a prompt of {num_tokens} tokens the model's context of "
                f"{longest} leaves {longest - num_tokens}",
                param="min_tokens",
                num_asked=params.min_tokens,
                num_prompt=num_tokens,
                longest=longest,
            )

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self.model.vocab_size)
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            num_asked = self.model.vocab_size if value == -1 else value or 0
            if 0 <= self.model.max_logprobs < num_asked:
                raise RequestError(
                    f"{name} is {value}; this engine gives at most {self.model.max_logprobs}, or all with "
                    "--max-logprobs -1",
                    param=name,
                )
        for text in params.stop:
            check_text("stop", text)
        for name, label in (("cache_salt", params.cache_salt), ("prompt_cache_key", params.prompt_cache_key)):
            if label is not None:
                check_text(name, label)


def prompt_text(prompt: Prompt) -> str | None:
    """The prompt's text; None for token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", ())
    return prompt if isinstance(prompt, str) else None


def is_token_id(value: object) -> bool:
    """Whether ``value`` is a whole number, of Python, numpy or torch."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not getattr(value, "ndim", 0))


def plain_token_ids(prompt: Any) -> Any:
    """``prompt``, but token ids of numpy, torch or other sequences as a list of Python's integers."""
    prompt = unboxed(prompt)
    if isinstance(prompt, (Sequence, Iterator)) and not isinstance(prompt, (str, bytes, list, tuple)):
        prompt = list(prompt)
    if isinstance(prompt, (list, tuple)) and any(type(one) is not int for one in prompt):
        return [operator.index(one) if not isinstance(one, bool) and is_token_id(one) else one for one in prompt]
    return prompt


def check_text(name: str, text: object) -> None:
    """Refuse values other than text, and lone surrogates, which JSON can contain but no encoding can write."""
    try:
        if not isinstance(text, str):
            raise RequestError(f"{name} is of type {type(text).__name__}; it must be text", param=name)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has half a surrogate pair at character {error.start}; it must be valid Unicode", param=name
        ) from error


def _refuse_unserved(prompt: Mapping[str, Any]) -> None:
    """Other keys, such as the caller's id, are ignored."""
    if refused := sorted(name for name in _NOT_SERVED if prompt.get(name) is not None):
        raise RequestError(f"the prompt has {refused[0]!r}, which is not served; leave it out", param="prompt")


def _only_entry(prompt: Mapping[str, Any]) -> Any:
    given = {name for name, value in prompt.items() if value is not None}
    _refuse_unserved(prompt)
    chosen = given & _CONTENTS
    if len(chosen) != 1:
        raise RequestError(
            f"the prompt has the keys {sorted(map(str, prompt))}; give either 'prompt' or 'prompt_token_ids'",
            param="prompt",
        )
    return prompt[chosen.pop()]
