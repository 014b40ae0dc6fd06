"""Reading a model's config.json so that no option is ignored by accident.  No torch.

Every key is taken by a reader, may be ignored (``unread_keys.py``), or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.unread_keys import UnreadKeys, is_nothing, override_without

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])

# For a model with a text part and others: keys of the others, and keys of the whole that hold for the text part too.
_OTHER_PARTS = re.compile(
    r"(vision|audio|image|video|visual|projector|multimodal|mm)_|.*_token_(id|index)$|spatial_merge_size$|out_hidden_size$|"
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

# Keys of transformers 5, and the older ones that each stands for.
_STANDS_FOR = {
    "rope_parameters": ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"),
    "per_layer_config": ("global_head_dim", "num_global_key_value_heads"),
}

# A number decides how much is computed and allocated before a weight is read.  The largest models have some 130 layers
# and 1,000 experts, and their largest number is a number of positions.
_LARGEST = 2**31
_LARGEST_FLOAT = 1e30
_MOST = {
    "num_hidden_layers": 4096,
    "num_nextn_predict_layers": 4096,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "moe_num_experts": 2**16,
}


class ConfigJson:
    """One JSON object, and which of its keys have been taken so far.

    ``origin`` is its file and ``path`` the keys that lead to it there; errors name both.  ``unread`` notes the keys
    that are ignored.  The user can change a file that ``can_override``.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        origin: str = "config.json",
        *,
        path: tuple[str, ...] = (),
        unread: UnreadKeys | None = None,
        can_override: bool = True,
    ) -> None:
        self._values = dict(values)
        self._file, self._path = origin, path
        self.origin = ": ".join((origin, *path))
        self._taken: set[str] = set()
        self.unread = UnreadKeys() if unread is None else unread
        self._can_override = can_override

    def text_part(self, *kinds: str) -> ConfigJson:
        """Return the text part of a model with several parts: ``text_config``, or, in older files, keys beside the
        others'.  Raises ``ConfigError`` if its ``model_type`` is none of ``kinds``, unless there are none.

        transformers 4.52 to 4.57 saved keys of the text part both there and beside it, and read the inner ones: an
        outer key is judged only where the inner object lacks it, and no other part has the same.  Embeddings are tied
        if either of the whole and the text part says so; false in the text part alone means the default of the whole,
        as in transformers.
        """
        found = self._find_text_part()
        if kinds:
            found.take_one_of("model_type", *kinds)
        return found

    def _find_text_part(self) -> ConfigJson:
        whole = {name: value for name, value in self._values.items() if name in _OF_THE_WHOLE and value is not None}
        inner = self._values.get("text_config")
        if isinstance(inner, dict):
            outer, copies = self._beside_text_part(), self.copies_of_text_part
            others = [one for name, one in self._values.items() if _OTHER_PARTS.match(name) and isinstance(one, dict)]
            judged = {
                name: value
                for name, value in outer.items()
                if name not in copies and not any(name in one and one[name] == value for one in others)
            }
            self.below(judged).finish()
            if inner.get("tie_word_embeddings") is True:
                whole["tie_word_embeddings"] = True
            elif "tie_word_embeddings" not in whole:
                inner = {name: value for name, value in inner.items() if name != "tie_word_embeddings"}
            eos = {name: self._values[name] for name in ("eos_token_id",) if self._values.get(name) is not None}
            return self.below({**inner, **whole, **eos}, "text_config")
        own = {
            name: value
            for name, value in self._values.items()
            if not _OTHER_PARTS.match(name) or name in ("eos_token_id", "bos_token_id", "pad_token_id")
        }
        return self.below(own)

    def _beside_text_part(self) -> dict[str, Any]:
        """The keys outside of ``text_config`` that are neither of the whole nor of another part."""
        known = (*_OF_THE_WHOLE, "text_config", "eos_token_id")
        return {
            name: value for name, value in self._values.items() if name not in known and not _OTHER_PARTS.match(name)
        }

    @property
    def copies_of_text_part(self) -> dict[str, Any]:
        """The keys beside ``text_config`` that count for nothing, since it has them too."""
        inner = self._values.get("text_config")
        if not isinstance(inner, dict):
            return {}
        known = {*inner, *(name for key, names in _STANDS_FOR.items() if key in inner for name in names)}
        return {name: value for name, value in self._beside_text_part().items() if name in known}

    def below(self, values: Mapping[str, Any], *names: str) -> ConfigJson:
        """Another object of the same file, found under the keys ``names`` of this one."""
        path, how = (*self._path, *names), self._can_override
        return ConfigJson(values, self._file, path=path, unread=self.unread, can_override=how)

    def changed(self, changes: Mapping[str, Any]) -> ConfigJson:
        """Return the same object with other values of some keys, of which none has been taken."""
        return self.below({**self._values, **changes})

    def take(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the value of ``name``, or ``default`` where it is absent.  Raises ``ConfigError`` for a wrong type.

        Null is false, and the default of anything but a number.  A number other than 0 has no value that means none, so
        null is refused, unless there is no ``default``: then the caller knows what it means.
        """
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            return self._of_null(name, kind, default) if self.has(name) else default
        if type(value) in (int, float):
            self._check_size(name, value, _LARGEST if kind is int else _LARGEST_FLOAT)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self.origin}: {name} is {shown(value)}; it must be of type {kind.__name__}")
        return value

    def _of_null(self, name: str, kind: type[T], default: T | None) -> T | None:
        if default is None or kind not in (bool, int, float):
            return default
        if default and kind is not bool:
            rule = f"there is no way to compute without this number, and without the key it is {default}"
            raise self.refusal(name, None, rule, "write a number, or leave the key out")
        return kind()  # false, or 0

    @property
    def architecture(self) -> str:
        """The one architecture that the checkpoint names."""
        listed = self.require("architectures", list)
        if len(listed) != 1 or not isinstance(listed[0], str):
            raise ConfigError(f"{self.origin}: architectures is {shown(listed)}; it must be a list of one name")
        return listed[0]

    def peek(self, name: str) -> Any:
        """Return the value of ``name``, of any type, without taking it; None if it is absent."""
        return self._values.get(name)

    @property
    def values(self) -> dict[str, Any]:
        """Return a copy of the object, of which nothing is taken."""
        return dict(self._values)

    @property
    def names(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._values)

    def has(self, name: str) -> bool:
        """Return whether the key is present, even as null."""
        return name in self._values

    def skip(self, *names: str) -> None:
        """Take keys that are known not to matter here."""
        self._taken.update(names)

    def require(self, name: str, kind: type[T]) -> T:
        """Like ``take``, for a key that must be present."""
        value = self.take(name, kind)
        if value is None:
            raise ConfigError(f"{self.origin} has no {name}; is this the configuration of a complete model?")
        return value

    def require_positive(self, name: str) -> int:
        """Return a size: a whole number above zero."""
        return self._positive(name, self.require(name, int))

    def take_positive(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a size, at least ``least``, with a default."""
        value = self.take(name, int, default)
        if value is None or self.peek(name) is None:
            return default
        if 0 < value < least:
            raise ConfigError(f"{self.origin}: {name} is {value}; it must be at least {least}")
        return self._positive(name, value)

    def _positive(self, name: str, value: int) -> int:
        if value <= 0:
            raise ConfigError(f"{self.origin}: {name} is {value}; it must be positive")
        self._check_size(name, value, _MOST.get(name, _LARGEST))
        return value

    def _check_size(self, name: str, value: float, largest: float) -> None:
        if not abs(value) <= largest:  # NaN is refused too
            raise ConfigError(f"{self.origin}: {name} is {shown(value)}; no model has more than {largest:,}")

    def take_one_of(self, name: str, *choices: str, remedy: str = "use another model") -> str:
        """Return a text that must be one of ``choices``, of which the first is the default."""
        value = self.take(name, str, choices[0])
        if value not in choices:
            raise self.refusal(name, value, f"it must be {' or '.join(choices)}", remedy)
        return value

    def take_token_ids(self, name: str) -> tuple[int, ...]:
        """Return a token id or a list of them, as a tuple; empty where the key is absent or null."""
        self._taken.add(name)
        value = self._values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed):
            raise ConfigError(f"{self.origin}: {name} is {shown(value)}; it must be a token id or a list of them")
        return tuple(listed)

    def take_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers; empty where the key is absent or null."""
        values = self.take(name, list, [])
        for value in values or []:
            if type(value) not in (int, float):
                raise ConfigError(f"{self.origin}: {name} is {shown(values)}; it must be a list of numbers")
            self._check_size(name, value, _LARGEST_FLOAT)
        return tuple(float(value) for value in values or [])

    def take_object(self, name: str) -> ConfigJson | None:
        """Return the object under ``name``; None where it is absent, null or empty."""
        values = self.take(name, dict)
        return self.below(values, name) if values else None

    def objects(self) -> dict[str, ConfigJson]:
        """Return all values, which must be objects."""
        return {name: self.below(self.require(name, dict), name) for name in self._values}

    def take_names(self, *names: str) -> tuple[str, ...]:
        """Return the texts in the lists ``names``, which are spellings of one key; empty where all are absent or
        null."""
        found: dict[str, None] = {}
        for name in names:
            listed = self.take(name, list, []) or []
            if not all(isinstance(one, str) for one in listed):
                raise ConfigError(f"{self.origin}: {name} is {shown(listed)}; it must be a list of names")
            found |= dict.fromkeys(listed)
        return tuple(found)

    def take_either(self, kind: type[T], *names: str) -> T | None:
        """Return the first value that is present under ``names``, which are spellings of one key."""
        found = [self.take(name, kind) for name in names]
        return next((value for value in found if value is not None), None)

    def take_block(self, name: str) -> tuple[int, int] | None:
        """Two sizes, rows and columns; None where the key is absent or null."""
        listed = self.take(name, list)
        if listed is None:
            return None
        if len(listed) != 2 or not all(type(size) is int and size > 0 for size in listed):
            raise ConfigError(f"{self.origin}: {name} is {shown(listed)}; it must be two positive sizes: rows, columns")
        return listed[0], listed[1]

    def refusal(self, name: str, value: object, rule: str, remedy: str) -> ConfigError:
        """Return the error for a value that is not supported."""
        return ConfigError(f"{self.origin}: {name} is {shown(value)}; {rule}: {remedy}")

    def expect(self, name: str, kind: type[T], supported: T) -> None:
        """Take an option that has one supported value, which is also its default; a number may be null."""
        value = self.take(name, kind, supported if kind is bool else None)
        if value not in (None, supported):
            raise ConfigError(f"{self.origin}: {name} is {shown(value)}; this engine supports only {supported!r}")

    def finish(self) -> None:
        """Refuse every key that was not taken and may not be ignored."""
        self._refuse(self.unread.sort(self._untaken, self._path))

    def finish_strictly(self, *ignored: str) -> None:
        """Refuse all keys that were not taken, but for ``ignored``: for a rotation, or a quantisation, where every key
        matters."""
        self._refuse(
            {name: one for name, one in self._untaken.items() if name not in ignored and not is_nothing(name, one)}
        )

    @property
    def _untaken(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in self._taken}

    def _refuse(self, unknown: Mapping[str, Any]) -> None:
        if not unknown:
            return
        listed = ", ".join(f"{name}={shown(value)}" for name, value in sorted(unknown.items()))
        override = override_without(sorted(unknown), self._path)
        raise ConfigError(
            f"{self.origin} sets options that this engine does not support for this architecture: {listed}. "
            "Ignoring them could change what the model says; use another model or, if they do nothing, remove them"
            + (f" with --hf-overrides '{override}'" if self._can_override else "")
        )
