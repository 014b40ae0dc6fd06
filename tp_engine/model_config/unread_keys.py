"""Keys of config.json that a family's reader does not take: which are ignored, and which are refused.  No torch.

::

    value null, false, [], {} or ""    asks for nothing                         ignored silently
    name in ``_IGNORED``               training, bookkeeping, other programs    ignored, in the log
    name in ``_OF_GENERATION``         an option of transformers' generate      ignored, in the log; a warning unless
                                                                                the value is its default
    any other                          may change what the model computes       refused by name

A key that transformers does not know either is refused too: a mechanism that transformers lacks is by definition
unknown to it.  Names are matched as a whole.  ``_IGNORED`` holds no name of a mechanism: scales, caps, windows, masks,
norms, positions, routing and activations have no weights, so that nothing else would tell that they are missing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What the names are about: expressions, each for a whole name.
_IGNORED = {
    "training": (
        r"(\w+_)?dropout(_prob|_p|_rate)?",
        r"(attn|embd|resid|summary)_pdrop",
        r"(\w+_)?(aux|z|balance|balancing)_loss(_\w+)?",
        r"loss_(type|function|reduction|coef|weight|scale)",
        r"(\w+_)?loss_(coef|weight|alpha|lambda|type|scaling_factor)",
        r"seq_aux",
        r"initializer_(range|factor|std)",
        r"(\w+_)?init_(std|method)",
        r"(\w+_)?jitter_(noise|eps)",
        r"neftune\w*",
        r"gradient_checkpointing\w*",
        r"use_liger_kernel",
    ),
    "multi-token prediction, whose layers are not run": (
        r"mtp_\w+",
        r"num_mtp\w*",
        r"use_mtp",
        r"num_nextn_predict\w*",
        r"(\w+_)?mtp_iteration",
    ),
    "tokens": (
        r"(bos|pad|sep|unk|cls|mask|decoder_start|forced_bos|forced_eos|bo[aiv]|eo[aiv]|image|audio|video)_token_id",
        r"(vision|vision_start|vision_end)_token_id",
        r"tokenizer_(class|model_max_length|padding_side)",
        r"model_max_length",
        r"max_sequence_length",
    ),
    "bookkeeping": (
        r"(transformers|tokenizers|torch|peft|trl|unsloth|axolotl|mergekit|llamafactory|modelopt|quark|optimum)_version",
        r"unsloth\w*",
        r"auto_map",
        r"custom_generate",
        r"model_type",
        r"_name_or_path",
        r"_commit_hash",
        r"(_attn|_experts|attn|experts)_implementation(_\w+)?",
        r"_flash_attn_2_enabled",
        r"is_llama_config",
        r"transformers\.js_config",
        r"id2label|label2id|problem_type|finetuning_task|task_specific_params",
        r"is_matryoshka|matryoshka_dimensions",  # read by pooling.py
    ),
    "how other programs run it": (
        r"use_(cache|return_dict|bfloat16|kernels|flash_attn|flash_attention|flash_attention_2)",
        r"cache_implementation",
        r"chunk_size_feed_forward",
        r"output_(attentions|hidden_states|router_logits|scores)",
        r"return_dict(_in_generate)?",
        r"remove_invalid_values",
        r"torchscript|tf_legacy_loss|pruned_heads",
        r"ep_size",
        r"pretraining_tp",  # sums in another order
    ),
}
_IGNORED_NAME = re.compile("|".join(one for expressions in _IGNORED.values() for one in expressions))

# Sampling options that older versions of transformers kept in config.json, at the values that change nothing there.
_OF_GENERATION: dict[str, float] = {
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1,
    "max_length": 20,
    "max_new_tokens": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "temperature": 1,
    "top_k": 50,
    "top_p": 1,
    "typical_p": 1,
    "do_sample": False,
    "early_stopping": False,
}

# Keys whose ``false`` asks for something: for the absence of a part that every family here has.
_FALSE_ASKS = re.compile(r"(is_|use_)?causal(_mask|_attention)?|use_(rope|rotary\w*|rms_?norm|input_norm|swiglu)")


@dataclass(slots=True)
class UnreadKeys:
    """The keys of one config.json that were ignored so far; keys of nested objects are written ``text_config.name``."""

    ignored: list[str] = field(default_factory=list)
    of_generation: list[str] = field(default_factory=list)

    def sort(self, values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
        """Note which keys of the object under ``path`` are ignored; returns those that must be refused."""
        refused: dict[str, Any] = {}
        for name, value in values.items():
            written = ".".join((*path, name))
            if is_nothing(name, value):
                continue
            if name in _OF_GENERATION:
                is_default = type(value) in (int, float) and value == _OF_GENERATION[name]
                (self.ignored if is_default else self.of_generation).append(written)
            elif _IGNORED_NAME.fullmatch(name):
                self.ignored.append(written)
            else:
                refused[name] = value
        return refused

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was ignored although somebody may expect an effect."""
        if not self.of_generation:
            return ()
        listed = ", ".join(sorted(self.of_generation))
        remedy = "write them into generation_config.json, or set --override-generation-config"
        return (f"config.json: {listed} are options of generation, which have no effect here: {remedy}",)


def is_nothing(name: str, value: Any) -> bool:
    """Return whether the key asks for nothing: its value is null, false or empty."""
    return value is None or value in ([], {}, "") or (value is False and not _FALSE_ASKS.fullmatch(name))


def override_without(names: Sequence[str], path: Sequence[str]) -> str:
    """Return the value of ``--hf-overrides`` that removes the keys ``names`` of the object under ``path``."""
    removed: dict[str, Any] = dict.fromkeys(names)
    for name in reversed(path):
        removed = {name: removed}
    return json.dumps(removed)
