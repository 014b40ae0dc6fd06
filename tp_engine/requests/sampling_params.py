"""Sampling parameters, with the names and ranges of vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from tp_engine.errors import RequestError, shown
from tp_engine.options.fields import key, unboxed
from tp_engine.options.foreign_rows import Become, accepted, refused, to_option, translated
from tp_engine.options.intake import takes_names_of_others
from tp_engine.options.params import as_tuple, check_params, number, switch, takes_forms, whole, wrong_type
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


def _token_ids(name: str, token_ids: Iterable[object]) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise RequestError(f"{name} contains {shown(token_id)}; token ids are whole numbers from 0 on", param=name)


if TYPE_CHECKING:  # what callers may give
    Texts: TypeAlias = Sequence[str]
    Ids: TypeAlias = Sequence[int]
else:  # what a record holds, also one that is read from another process
    Texts = tuple[str, ...]
    Ids = tuple[int, ...]


class RequestOutputKind(enum.Enum):
    """What ``AsyncLLM.generate`` yields: everything so far each time, only what is new, or everything at the end."""

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


def _stops(value: object) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else as_tuple("stop")(value)


def _allowed(value: object) -> tuple[Any, ...] | None:
    return None if value is None else as_tuple("allowed_token_ids")(value)


def _bias(value: object) -> object:
    return {unboxed(name): unboxed(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _seed(value: object) -> object:
    return None if value == -1 else value


def _constraint(value: object) -> StructuredOutputsParams | None:
    if isinstance(value, Mapping):
        return StructuredOutputsParams(**value)
    if not isinstance(value, (StructuredOutputsParams, type(None))):
        raise wrong_type("structured_outputs", value, "StructuredOutputsParams")
    return value


_ALTERNATIVES = "a whole number of at least 0, -1 (all tokens), or None"


@takes_names_of_others(_OTHER_NAMES)
@takes_forms
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    ``temperature`` 0 is greedy.  ``top_k`` 0 or -1 means all tokens.  ``seed`` gives the same sample in any batch; None
    or -1 gives another one each time.  ``max_tokens`` None means as many as the model's context allows.
    ``logprobs`` and ``prompt_logprobs`` are the number of alternatives per token (None for none, -1 for all tokens).
    ``bad_words`` never appear as separate words, at the beginning or within text, however they are tokenized.
    ``detokenize`` False leaves texts empty; there can be no stop strings then.  ``truncate_prompt_tokens`` keeps that
    many of the prompt's last tokens, -1 as many as leave room for ``max_tokens``.  ``output_kind`` is for
    ``AsyncLLM.generate``.  ``prompt_cache_key`` names the session that the request belongs to, for prefetching from the
    host tier.  ``structured_outputs`` constrains the form of the output.

    Numbers may be numpy's or torch's, lists any iterables.  Names of vLLM, SGLang and OpenAI's API for one of these are
    accepted, too.  Raises ``RequestError`` for a value out of range, and for an unknown name, with the nearest one.
    """

    n: int = whole(1, f"a whole number from 1 to {MAX_N}", least=1, most=MAX_N)
    temperature: float = number(1.0, "between 0 (greedy) and 100", 0, 100)
    top_p: float = number(1.0, "above 0 and at most 1", 1e-9, 1)
    top_k: int = whole(0, "-1 or 0 (all tokens), or a positive whole number", least=-1)
    min_p: float = number(0.0, "between 0 and 1", 0, 1)
    presence_penalty: float = number(0.0, "between -2 and 2", -2, 2)
    frequency_penalty: float = number(0.0, "between -2 and 2", -2, 2)
    repetition_penalty: float = number(1.0, "above 0 and at most 100", 1e-6, 100)
    logit_bias: Mapping[int, float] | None = key(None, form=_bias)
    allowed_token_ids: Ids | None = key(None, form=_allowed)
    seed: int | None = whole(None, "a 64-bit whole number, or None", -(2**63), 2**63 - 1, form=_seed)
    stop: Texts = key((), form=_stops)
    stop_token_ids: Ids = key((), form=as_tuple("stop_token_ids"))
    bad_words: Texts = key((), form=as_tuple("bad_words"))
    include_stop_str_in_output: bool = switch(False)
    ignore_eos: bool = switch(False)
    min_tokens: int = whole(0, "a whole number of at least 0")
    max_tokens: int | None = whole(16, "a whole number of at least 1, or None", least=1)
    logprobs: int | None = whole(None, _ALTERNATIVES, least=-1)
    prompt_logprobs: int | None = whole(None, _ALTERNATIVES, least=-1)
    skip_special_tokens: bool = switch(True)
    detokenize: bool = switch(True)
    truncate_prompt_tokens: int | None = whole(
        None, "-1 (what the context allows), or a positive whole number", least=1, besides=-1
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputsParams | None = key(None, form=_constraint)

    def __post_init__(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong_type("output_kind", self.output_kind, "a RequestOutputKind")
        check_params(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            text = f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}"
            raise RequestError(text, param="min_tokens")
        self._check_stops()
        self._check_bad_words()
        self._check_ids()

    @classmethod
    def of(cls, given: object, default: SamplingParams) -> SamplingParams:
        """``given`` itself, one made from a mapping of fields, or the ``default`` for None; else ``RequestError``."""
        if given is None:
            return default
        if isinstance(given, Mapping):
            return cls(**given)
        if not isinstance(given, SamplingParams):
            raise wrong_type("sampling_params", given, "SamplingParams, or a mapping of its fields")
        return given

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Parameters with the defaults for fields that are None, except ``max_tokens``, where None means no limit of
        its own.  The keys of ``logit_bias`` may be texts, as in JSON."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            is_id = {key: isinstance(key, str) and key.isdecimal() for key in bias}  # other keys are left for the check
            given["logit_bias"] = {int(key) if is_id[key] else key: value for key, value in bias.items()}
        return cls(**given)

    def clone(self, **changes: Any) -> Self:
        """A copy with ``changes``; a record itself cannot be changed."""
        return replace(self, **changes)

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
            raise wrong_type("logit_bias", bias, "a mapping from token ids to numbers")
        if len(bias) > MAX_BIAS_ENTRIES:
            raise RequestError(
                f"{len(bias)} entries in logit_bias; at most {MAX_BIAS_ENTRIES} are allowed", param="logit_bias"
            )
        _token_ids("logit_bias", bias)
        for value in bias.values():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise wrong_type("logit_bias", value, "a number between -100 and 100")
            if not -100.0 <= value <= 100.0:
                text = f"logit_bias is {shown(value)}; it must be between -100 and 100"
                raise RequestError(text, param="logit_bias")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``RequestError`` for a token id outside of the vocabulary, and for more allowed ids than it has."""
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
@takes_forms
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How one prompt is searched: ``beam_width`` beams of at most ``max_tokens`` tokens, with vLLM's field names.

    Beams are ranked by cum_logprob / length ** ``length_penalty``; the length counts prompt and generated tokens but
    not a final EOS, as in vLLM.  ``include_stop_str_in_output`` shows the EOS in the text.  ``temperature`` is accepted
    because callers send it, and changes nothing: a search does not sample, and log-probabilities are the model's own.
    Raises ``RequestError`` for a value out of range.
    """

    beam_width: int = whole(MISSING, f"a whole number from 1 to {MAX_BEAM_WIDTH}", least=1, most=MAX_BEAM_WIDTH)
    max_tokens: int = whole(MISSING, "a whole number of at least 1", least=1)
    ignore_eos: bool = False
    temperature: float = number(0.0, "between 0 and 100", 0, 100)
    length_penalty: float = number(
        1.0, f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
    )
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_params(self)
