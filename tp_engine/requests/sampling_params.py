"""Sampling parameters, with the names and ranges of vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tp_engine.errors import RequestError, shown
from tp_engine.options.foreign_rows import Become, accepted, refused, to_option, translated
from tp_engine.options.intake import takes_names_of_others
from tp_engine.requests.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_CHARACTERS = 16_384  # of all bad words together
MAX_STOP_CHARACTERS = 4096  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_BIAS_ENTRIES = 1024
MAX_N = 1024
MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 10.0


def _in_range(name: str, value: object, low: float, high: float, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(name, value, f"a number {rule}")
    if not low <= value <= high:  # NaN is not either
        raise RequestError(f"{name} is {shown(value)}; it must be {rule}", param=name)


def _whole(name: str, value: object, low: int, rule: str, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, value, rule)
    if not low <= value <= high:
        raise RequestError(f"{name} is {shown(value)}; it must be {rule}", param=name)


def _token_ids(name: str, token_ids: Iterable[object]) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise RequestError(f"{name} contains {shown(token_id)}; token ids are whole numbers from 0 on", param=name)


def _wrong_type(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)} of type {type(value).__name__}; it must be {rule}", param=name)


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """A user's list, None for an empty one, as a tuple that can not change after the checks."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(name, value, "a list")
    return tuple(value)


class RequestOutputKind(enum.Enum):
    """What each output of ``AsyncLLM.generate`` holds: all until then, what is new, or all at the end alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _structured(kind: str) -> Become:
    return lambda value: {"structured_outputs": StructuredOutputsParams(**{kind: value})}


_OTHER_NAMES = (
    *accepted(
        "has no effect",
        "output_text_buffer_length skip_clone skip_reading_prefix_cache spaces_between_special_tokens stream_interval",
    ),
    *translated(to_option("max_tokens"), "max_completion_tokens max_new_tokens"),
    *translated(to_option("min_tokens"), "min_new_tokens"),
    *translated(to_option("include_stop_str_in_output"), "no_stop_trim"),
    *translated(_structured("json"), "json_schema"),
    *translated(_structured("regex"), "regex"),
    *translated(_structured("grammar"), "ebnf"),
    *refused("set structured_outputs=StructuredOutputsParams(...)", "guided_decoding structural_tag"),
    *refused("set n, or call beam_search", "best_of num_beams", harmless=(None, 1)),
    *refused("call beam_search with BeamSearchParams", "early_stopping length_penalty use_beam_search"),
    *refused("temperature 0 takes the likeliest token", "do_sample", harmless=(None, True)),
    *refused(
        "the engine has no such function; leave it out",
        "custom_params extra_args flat_logprobs logits_processors logprob_token_ids prompt_logprob_start "
        "prompt_logprob_token_ids repetition_detection routed_experts_prompt_start stop_regex thinking_token_budget "
        "trace_decode_token_ids watermarking",
    ),
)


_PLAIN = frozenset({bool, dict, float, int, list, str, tuple, type(None), RequestOutputKind, StructuredOutputsParams})


@takes_names_of_others(_OTHER_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    ``temperature`` 0 is greedy.  ``top_k`` 0 or -1 means all tokens.  ``seed`` gives the same sample in any batch; -1
    is None, which gives another one each time.  ``max_tokens`` None means as many as the model's context allows.
    ``logprobs`` and ``prompt_logprobs`` are the number of alternatives per token (None for none, -1 for all tokens).
    ``bad_words`` never appear as words of their own, at the beginning or within text, whatever their tokens are.
    ``detokenize`` False leaves texts empty; there are no stop strings then.  ``truncate_prompt_tokens`` keeps that many
    of the prompt's last tokens, -1 as many as leave room for ``max_tokens``.  ``output_kind`` is for
    ``AsyncLLM.generate``.  ``prompt_cache_key`` names the session that the request belongs to, for prefetching from
    the host tier.  ``structured_outputs`` constrains the form of the output.

    Numbers and lists may be numpy's.  Names of vLLM, SGLang and OpenAI's API that mean one of these are taken too.
    Raises ``RequestError`` for a value out of range, and for an unknown name, with the nearest one.
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
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in self.__slots__]
        if not _PLAIN.issuperset(map(type, values)):
            for name, value in zip(self.__slots__, values, strict=True):
                if hasattr(value, "tolist"):
                    object.__setattr__(self, name, value.tolist())
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_kinds()
        self._check_ranges()
        self._check_stops()
        self._check_bad_words()
        self._check_ids()

    @classmethod
    def of(cls, given: object, default: SamplingParams) -> SamplingParams:
        """``given`` itself, made of a mapping of its fields, or the ``default`` for None; else ``RequestError``."""
        if given is None:
            return default
        if isinstance(given, Mapping):
            return cls(**given)
        if not isinstance(given, SamplingParams):
            raise _wrong_type("sampling_params", given, "SamplingParams, or a mapping of its fields")
        return given

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Return parameters with the defaults for fields that are None, except ``max_tokens``, for which None means no
        limit of its own.  The keys of ``logit_bias`` may be texts, as in JSON."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            is_id = {key: isinstance(key, str) and key.isdecimal() for key in bias}  # other keys are left for the check
            given["logit_bias"] = {int(key) if is_id[key] else key: value for key, value in bias.items()}
        return cls(**given)

    def clone(self, **changes: Any) -> Self:
        """Return a copy, with ``changes``; it can be changed in no other way."""
        return replace(self, **changes)

    def _check_kinds(self) -> None:
        if isinstance(self.structured_outputs, Mapping):
            constraint = StructuredOutputsParams(**self.structured_outputs)
            object.__setattr__(self, "structured_outputs", constraint)
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise _wrong_type("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong_type("output_kind", self.output_kind, "a RequestOutputKind")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), "True or False")

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
                _whole(name, value, -1, "a whole number of at least 0, -1 (all tokens), or None")

        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            rule = "-1 (what the context allows), or a positive whole number"
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, rule)

    def _check_stops(self) -> None:
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are found in the text, and detokenize is False; set one", param="stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {shown(text)}; every stop must be a non-empty string", param="stop")
            if len(text) > MAX_STOP_CHARACTERS:
                text = f"stop contains a text of {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
                raise RequestError(text, param="stop")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            text = f"{len(self.bad_words)} bad words; at most {MAX_BAD_WORDS} are allowed"
            raise RequestError(text, param="bad_words")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip():
                raise RequestError(f"bad_words contains {shown(text)}; every word must be a text", param="bad_words")
        longest, total = max(map(len, self.bad_words), default=0), sum(map(len, self.bad_words))
        if longest > MAX_BAD_WORD_CHARACTERS or total > MAX_BAD_CHARACTERS:
            raise RequestError(
                f"bad_words has {total} characters, its longest word {longest}; at most {MAX_BAD_CHARACTERS} in all, "
                f"and {MAX_BAD_WORD_CHARACTERS} in a word, are allowed",
                param="bad_words",
            )

    def _check_ids(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            text = f"{len(self.stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            raise RequestError(text, param="stop_token_ids")
        _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty; give at least one id, or None", param="allowed_token_ids"
                )
            _token_ids("allowed_token_ids", self.allowed_token_ids)
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise _wrong_type("logit_bias", bias, "a mapping from token ids to numbers")
        if len(bias) > MAX_BIAS_ENTRIES:
            raise RequestError(
                f"{len(bias)} entries in logit_bias; at most {MAX_BIAS_ENTRIES} are allowed", param="logit_bias"
            )
        _token_ids("logit_bias", bias)
        for value in bias.values():
            _in_range("logit_bias", value, -100.0, 100.0, "between -100 and 100")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``RequestError`` for a token id outside of the vocabulary, and for more ids than it has."""
        num_allowed = len(self.allowed_token_ids or ())
        if num_allowed > vocab_size:
            text = (
                f"allowed_token_ids has {num_allowed} ids; the model's vocabulary has {vocab_size}, give each id once"
            )
            raise RequestError(text, param="allowed_token_ids")
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


@takes_names_of_others()
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
