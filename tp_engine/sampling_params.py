"""Sampling parameters, with the names and ranges of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import RequestError
from tp_engine.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BIAS_ENTRIES = 1024
MAX_N = 1024
MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 10.0


def _in_range(name: str, value: float, low: float, high: float, rule: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise RequestError(f"{name} is {value!r}; it must be {rule}", param=name)


def _whole(name: str, value: object, low: int, rule: str, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; it must be {rule}", param=name)


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """A user's list, None for an empty one, as a tuple that can not change after the checks."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} is {value!r}; it must be a list", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    ``temperature`` 0 is greedy.  ``top_k`` 0 or -1 means all tokens.  ``seed`` gives the same sample in any batch.
    ``max_tokens`` None means as many as the model's context allows.  ``logprobs`` and ``prompt_logprobs`` are the
    number of alternatives per token (None for none).  ``bad_words`` never appear, alone or within text.
    ``prompt_cache_key`` names the session that the request belongs to, for prefetching from the host tier.
    ``structured_outputs`` constrains the form of the output.  Raises ``RequestError`` for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            kind = type(self.structured_outputs).__name__
            raise RequestError(
                f"structured_outputs is of type {kind}; it must be StructuredOutputsParams", param="structured_outputs"
            )
        self._check_ranges()
        self._check_stops()
        self._check_bad_words()
        self._check_ids()

    def _check_ranges(self) -> None:
        _whole("n", self.n, 1, f"a whole number from 1 to {MAX_N}", MAX_N)
        _in_range("temperature", self.temperature, 0.0, 100.0, "between 0 (greedy) and 100")
        _in_range("top_p", self.top_p, 1e-9, 1.0, "above 0 and at most 1")
        _whole("top_k", self.top_k, -1, "-1 or 0 (all tokens), or a positive whole number")
        _in_range("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        _in_range("repetition_penalty", self.repetition_penalty, 1e-6, 100.0, "above 0 and at most 100")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), "a 64-bit whole number, or None", 2**63 - 1)
        _whole("min_tokens", self.min_tokens, 0, "a whole number of at least 0")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, "a whole number of at least 1, or None")
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}",
                    param="min_tokens",
                )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _whole(name, value, 0, "a whole number of at least 0, or None")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; every stop must be a non-empty string", param="stop")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            text = f"{len(self.bad_words)} bad words; at most {MAX_BAD_WORDS} are allowed"
            raise RequestError(text, param="bad_words")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip():
                raise RequestError(f"bad_words contains {text!r}; every word must be a text", param="bad_words")

    def _check_ids(self) -> None:
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, "a list of token ids")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty; give at least one id, or None", param="allowed_token_ids"
                )
            for token_id in self.allowed_token_ids:
                _whole("allowed_token_ids", token_id, 0, "a list of token ids")
        bias = self.logit_bias or {}
        if len(bias) > MAX_BIAS_ENTRIES:
            raise RequestError(
                f"{len(bias)} entries in logit_bias; at most {MAX_BIAS_ENTRIES} are allowed", param="logit_bias"
            )
        for token_id, value in bias.items():
            _whole("logit_bias", token_id, 0, "a mapping from token ids")
            _in_range("logit_bias", value, -100.0, 100.0, "a mapping to values between -100 and 100")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``RequestError`` for a token id outside of the vocabulary."""
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias or ())),
        )
        for name, token_ids in named:
            if token_ids and max(token_ids) >= vocab_size:
                raise RequestError(
                    f"{name} contains {max(token_ids)}; the model's token ids end at {vocab_size - 1}", param=name
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How one prompt is searched: ``beam_width`` beams of at most ``max_tokens`` tokens, with vLLM's field names.

    Beams are ranked by cum_logprob / length ** ``length_penalty``; the length counts prompt and generated tokens but
    not a final EOS, as in vLLM.  ``include_stop_str_in_output`` shows the EOS in the text.  ``temperature`` is accepted
    because callers send it, and changes nothing: a search draws nothing, and log-probabilities are the model's own.
    Raises ``RequestError`` for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _whole("beam_width", self.beam_width, 1, f"a whole number from 1 to {MAX_BEAM_WIDTH}", MAX_BEAM_WIDTH)
        _whole("max_tokens", self.max_tokens, 1, "a whole number of at least 1")
        _in_range("temperature", self.temperature, 0.0, 100.0, "between 0 and 100")
        high = MAX_LENGTH_PENALTY
        _in_range("length_penalty", self.length_penalty, -high, high, f"between -{high:g} and {high:g}")
