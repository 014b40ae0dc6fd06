"""Reading a model's config.json so that no option is ignored by accident.  No torch.

Every key is taken by a reader, is known not to matter for inference, or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from tp_engine.errors import ConfigError

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])

IRRELEVANT_KEYS = frozenset(
    {
        # bookkeeping
        "_attn_implementation_autoset",
        "auto_map",
        "cache_implementation",
        "_commit_hash",
        "_name_or_path",
        "is_llama_config",
        "max_sequence_length",
        "model_type",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # training
        "attention_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "initializer_range",
        "neftune_noise_alpha",
        "resid_pdrop",
        "residual_dropout",
        # the shape of transformers' answers, not of the model
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torchscript",
        "use_cache",
        "use_return_dict",
        # tokenizer and generation defaults that the engine reads elsewhere or not at all
        "bos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        # embeddings, read by pooling.py
        "is_matryoshka",
        "matryoshka_dimensions",
    }
)

# For a model with a text part and others: keys of the others, and keys of the whole that hold for the text part too.
_OTHER_PARTS = re.compile(
    r"(vision|audio|image|video|visual|projector|multimodal|mm)_|.*_token_(id|index)$|spatial_merge_size$|"
    r"language_model_only$"
)
_OF_THE_WHOLE = (
    "architectures",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
)


class ConfigJson:
    """One JSON object, and which of its keys have been taken so far; ``origin`` names it in errors."""

    def __init__(self, values: Mapping[str, Any], origin: str = "config.json") -> None:
        self._values = dict(values)
        self._origin = origin
        self._taken: set[str] = set()

    def text_part(self) -> ConfigJson:
        """The text part of a model with several parts: ``text_config``, or, in older files, keys beside the others'."""
        whole = {name: value for name, value in self._values.items() if name in _OF_THE_WHOLE}
        inner = self._values.get("text_config")
        if isinstance(inner, dict):
            outer = {
                name: value
                for name, value in self._values.items()
                if name not in (*_OF_THE_WHOLE, "text_config", "eos_token_id") and not _OTHER_PARTS.match(name)
            }
            ConfigJson(outer, self._origin).finish()
            eos = {name: self._values[name] for name in ("eos_token_id",) if self._values.get(name) is not None}
            return ConfigJson({**inner, **whole, **eos}, f"{self._origin}: text_config")
        own = {
            name: value
            for name, value in self._values.items()
            if not _OTHER_PARTS.match(name) or name in ("eos_token_id", "bos_token_id", "pad_token_id")
        }
        return ConfigJson(own, self._origin)

    def take(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of ``name``; ``default`` where it is absent or null.  Raises ``ConfigError`` for a wrong type."""
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self._origin}: {name} is {value!r}; it must be of type {kind.__name__}")
        return value

    @property
    def architecture(self) -> str:
        """The one architecture that the checkpoint names."""
        return str(self.require("architectures", list)[0])

    def peek(self, name: str) -> Any:
        """The value of ``name``, of any type, without taking it; None if it is absent."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the key is present, even as null."""
        return name in self._values

    def is_taken(self, name: str) -> bool:
        """Whether a reader has taken the key."""
        return name in self._taken

    def skip(self, *names: str) -> None:
        """Take keys that are known not to matter here."""
        self._taken.update(names)

    def require(self, name: str, kind: type[T]) -> T:
        """Like ``take``, for a key that must be present."""
        value = self.take(name, kind)
        if value is None:
            raise ConfigError(f"{self._origin} has no {name}; is this the configuration of a complete model?")
        return value

    def require_positive(self, name: str) -> int:
        """A size: a whole number above zero."""
        return self._positive(name, self.require(name, int))

    def take_positive(self, name: str, default: int) -> int:
        """A size with a default."""
        value = self.take(name, int)
        return default if value is None else self._positive(name, value)

    def _positive(self, name: str, value: int) -> int:
        if value <= 0:
            raise ConfigError(f"{self._origin}: {name} is {value}; it must be positive")
        return value

    def take_token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty where the key is absent or null."""
        self._taken.add(name)
        value = self._values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed):
            raise ConfigError(f"{self._origin}: {name} is {value!r}; it must be a token id or a list of them")
        return tuple(listed)

    def take_floats(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty where the key is absent or null."""
        values = self.take(name, list, [])
        if not all(type(value) in (int, float) for value in values or []):
            raise ConfigError(f"{self._origin}: {name} is {values!r}; it must be a list of numbers")
        return tuple(float(value) for value in values or [])

    def take_object(self, name: str) -> ConfigJson | None:
        """The object under ``name``; None where it is absent, null or empty."""
        values = self.take(name, dict)
        return ConfigJson(values, f"{self._origin}: {name}") if values else None

    def objects(self) -> dict[str, ConfigJson]:
        """All values, which must be objects."""
        return {name: ConfigJson(self.require(name, dict), f"{self._origin}: {name}") for name in self._values}

    def take_names(self, *names: str) -> tuple[str, ...]:
        """The texts in the lists ``names``, which are spellings of one key; empty where all are absent or null."""
        found: dict[str, None] = {}
        for name in names:
            listed = self.take(name, list, []) or []
            if not all(isinstance(one, str) for one in listed):
                raise ConfigError(f"{self._origin}: {name} is {listed!r}; it must be a list of names")
            found |= dict.fromkeys(listed)
        return tuple(found)

    def take_either(self, kind: type[T], *names: str) -> T | None:
        """The first value that is present under ``names``, which are spellings of one key."""
        found = [self.take(name, kind) for name in names]
        return next((value for value in found if value is not None), None)

    def take_block(self, name: str) -> tuple[int, int] | None:
        """Two sizes, rows and columns; None where the key is absent or null."""
        listed = self.take(name, list)
        if listed is None:
            return None
        if len(listed) != 2 or not all(type(size) is int and size > 0 for size in listed):
            raise ConfigError(f"{self._origin}: {name} is {listed!r}; it must be two positive sizes, rows and columns")
        return listed[0], listed[1]

    def refusal(self, name: str, value: object, rule: str, remedy: str) -> ConfigError:
        """The error for a value that is not supported."""
        return ConfigError(f"{self._origin}: {name} is {value!r}; {rule}: {remedy}")

    def expect(self, name: str, kind: type[T], supported: T) -> None:
        """Take an option that has one supported value, which is also its default."""
        value = self.take(name, kind, supported)
        if value != supported:
            raise ConfigError(f"{self._origin}: {name} is {value!r}; this engine supports only {supported!r}")

    def finish(self, ignored: frozenset[str] = IRRELEVANT_KEYS) -> None:
        """Refuse every key that was not taken, unless its value is null, false or empty, which asks for nothing."""
        unknown = {
            name: value
            for name, value in self._values.items()
            if name not in self._taken and name not in ignored and value not in (None, False, [], {}, "")
        }
        if unknown:
            listed = ", ".join(f"{name}={value!r}" for name, value in sorted(unknown.items()))
            raise ConfigError(
                f"{self._origin} sets options that this engine does not support for this architecture: {listed}. "
                "Ignoring them could change what the model says; use another model, or remove a key that does nothing"
            )
