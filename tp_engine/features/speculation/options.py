"""Speculation: the option ``speculative_config``, with vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.options.fields import checked, json_object, key

CONFIG_NAME = "speculative_config"
METHODS = ("ngram", "suffix", "eagle3", "mtp")
_WITH_HEAD = ("eagle3", "mtp")
_MTP_FAMILIES = (  # vLLM's names of methods, each with _mtp after it; which head a model has is found in its files
    "bailing_hybrid bailing_hybrid_v3 deepseek dots3_note ernie exaone4_5 exaone_moe gemma4 glm4_moe glm4_moe_lite "
    "glm5_next glm_ocr hy_v3 hy_v4 inkling kimi_k3 longcat_flash mimo mimo_v2 minimax_m3 nemotron_h pangu_ultra_moe "
    "qwen3_5 qwen3_next qwen4_exp step3p5"
)
_ALIASES = {"ngram_gpu": "ngram", "nextn": "mtp"} | {f"{name}_mtp": "mtp" for name in _MTP_FAMILIES.split()}
_SHORTEST, _LONGEST = 2, 5
MOST_STEP_ROWS = 32  # with more rows a step is no longer bound by reading the weights


@checked(CONFIG_NAME)
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens are drafted.

    ``ngram``: the last ``prompt_lookup_max`` tokens, or fewer down to ``prompt_lookup_min``, are looked up in the
    request's own prompt and answer; what followed them there is the draft token, of up to ``num_speculative_tokens``.

    ``suffix``: they are looked up as by ``ngram``, and the last ``suffix_decoding_max_tree_depth`` tokens or fewer in
    the last ``suffix_decoding_max_cached_requests`` answers.  A draft token has at most
    ``suffix_decoding_max_spec_factor`` times as many tokens as the match, each of which followed in a share of
    ``suffix_decoding_min_token_prob`` of the matches.

    ``eagle3``: the draft head ``model``, a folder or a hub name, drafts ``num_speculative_tokens`` on the ranks.

    ``mtp``: so does the head for multi-token prediction in the model's own checkpoint; a ``model`` can only be that.

    Draft tokens have rows of their own beside those of the sequences.  A step with some has at most ``max_step_rows``
    decodes, draft tokens included; where more requests decode, none are drafted.  None is at most ``MOST_STEP_ROWS``,
    and the times of decode steps, measured at the start, say how many draft tokens pay.

    Raises ``ConfigError`` for a value, or two together, that cannot be.
    """

    method: str = key("ngram", choices=METHODS, told=True)
    model: str | None = None
    num_speculative_tokens: int = key(4, least=1, most=16, told=True)
    prompt_lookup_min: int = key(_SHORTEST, least=1)
    prompt_lookup_max: int = key(_LONGEST, least=1)
    suffix_decoding_max_tree_depth: int = key(24, least=1, most=64)
    suffix_decoding_max_cached_requests: int = key(10_000, least=1)
    suffix_decoding_max_spec_factor: float = key(1.0, positive=True)
    suffix_decoding_min_token_prob: float = key(0.1, positive=True, most=1)
    max_step_rows: int | None = key(None, least=2)  # a decode and a draft token

    def __post_init__(self) -> None:
        has_model, may_have = self.model is not None, self.method in _WITH_HEAD
        if has_model > may_have or (self.method == "eagle3" and not has_model):
            raise ConfigError(
                f"{CONFIG_NAME} has the method {self.method!r} and the model {self.model!r}; eagle3 needs the folder "
                "or the hub name of a draft head as its model, mtp can only have the served model's own, and no other "
                "method has one"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{CONFIG_NAME} has prompt_lookup_min {self.prompt_lookup_min} above prompt_lookup_max "
                f"{self.prompt_lookup_max}; lower the first or raise the second"
            )

    @property
    def has_head(self) -> bool:
        """Whether a head on the ranks drafts."""
        return self.method in _WITH_HEAD

    @property
    def most_rows(self) -> int:
        """Most decodes of a step, before times have been measured."""
        return MOST_STEP_ROWS if self.max_step_rows is None else self.max_step_rows

    def num_draft_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return how many rows after those of a batch of ``max_num_seqs`` are for draft tokens: all of a step with
        draft tokens but one."""
        return min(self.most_rows, max_num_seqs * (1 + self.num_speculative_tokens), max_num_batched_tokens) - 1

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
        """Return the record of the option's JSON object, as text or as a mapping; None: no speculation.  Raises
        ``ConfigError``.

        If only one of ``prompt_lookup_min`` and ``prompt_lookup_max`` is given, the other one follows it where its
        default does not fit.  Without a method, a ``model`` is a draft head.  ``mtp`` drafts one token unless
        ``num_speculative_tokens`` says more: heads are trained for the next one."""
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        known = [spec.name for spec in dataclasses.fields(cls)]
        example = '{"method":"ngram","num_speculative_tokens":4}'
        values = json_object(CONFIG_NAME, given, known, example=example)
        method = values.setdefault("method", "eagle3" if "model" in values else METHODS[0])
        if isinstance(method, str):
            values["method"] = method = _ALIASES.get(method.lower(), method.lower())
        if method == "eagle" and "model" not in values:  # SGLang's name for a model's own head
            values["method"] = method = "mtp"
        if method == "mtp":
            values.setdefault("num_speculative_tokens", 1)
        shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if longest is None and type(shortest) is int:
            values["prompt_lookup_max"] = max(shortest, _LONGEST)
        if shortest is None and type(longest) is int:
            values["prompt_lookup_min"] = min(longest, _SHORTEST)
        return cls(**values)
