"""What can become of an option of another server: it is accepted, refused, or sets options of this engine."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError, shown

OFF: tuple[Any, ...] = (None, False, 0, "", {}, [], ())
"""Values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """An option of another server: accepted with a ``reason``, refused with a remedy, or translated by ``become``.

    ``harmless`` values need no word.  What it sets ``yields`` to the same option if that is given too.  ``arity`` is
    that of the flag: "", "=" or "=*".
    """

    reason: str
    is_refused: bool = False
    become: Callable[[Any], Mapping[str, Any]] | None = None
    harmless: tuple[Any, ...] = OFF
    yields: bool = False
    arity: str = ""
    short_flags: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What becomes of the option, in words."""
        if self.is_refused:
            return f"refused: {self.reason}"
        return f"accepted: {self.reason}" if self.become is None else "translated, with a line in the log"


@dataclass(frozen=True, slots=True)
class ForeignValue:
    """Values that stand for ``means`` here (empty: the default), and are refused if that is None.

    ``patterns`` are globs in small letters.  If they name files, a file that exists is meant itself.
    """

    patterns: tuple[str, ...]
    means: str | None
    reason: str = ""
    is_file: bool = False

    def matches(self, value: str) -> bool:
        """Return whether ``value`` is one of them."""
        found = any(fnmatchcase(value.lower(), pattern) for pattern in self.patterns)
        return found and not (self.is_file and Path(value).is_file())


Become = Callable[[Any], Mapping[str, Any]]
Rows = Iterator[tuple[str, ForeignOption]]


def _named(names: str, **row: Any) -> Rows:
    words = names.split()
    for place, word in enumerate(words):
        if word.startswith("-"):
            continue
        name, equals, several = word.partition("=")
        following = words[place + 1 :]
        end = next((n for n, other in enumerate(following) if not other.startswith("-")), len(following))
        yield name, ForeignOption(arity=equals + several, short_flags=tuple(following[:end]), **row)


def accepted(reason: str, names: str, harmless: tuple[Any, ...] = OFF) -> Rows:
    """Options that change no result: the log names the ``reason``."""
    return _named(names, reason=reason, harmless=harmless)


def refused(remedy: str, names: str, harmless: tuple[Any, ...] = OFF) -> Rows:
    """Options that cannot be here what they are elsewhere."""
    return _named(names, reason=remedy, is_refused=True, harmless=harmless)


def translated(become: Become, names: str, reason: str = "", *, yields: bool = False) -> Rows:
    """Options that set options of this engine; the log names the ``reason`` for a value that sets none."""
    return _named(names, reason=reason, become=become, harmless=(None,), yields=yields)


def to_option(name: str, of: Callable[[Any], Any] = lambda value: value) -> Become:
    """Return the option ``name``, with the value ``of`` the given one, if that is not None."""

    def become(value: Any) -> Mapping[str, Any]:
        meant = of(value)
        return {} if meant is None else {name: meant}

    return become


def to_key(name: str, key: str, of: Callable[[Any], Any] = lambda value: value) -> Become:
    """``key`` of the JSON object ``name``."""
    return lambda value: {name: {key: of(value)}}


def to_choice(name: str, choices: Mapping[str, str]) -> Become:
    """Return the option ``name``, by a table of values."""

    def become(value: Any) -> Mapping[str, Any]:
        if value not in choices:
            raise ConfigError(f"{shown(value)} is none of {', '.join(choices)}; see --{name.replace('_', '-')}")
        return {name: choices[value]}

    return become


def to_adapters(value: Any) -> Mapping[str, Any]:
    """``lora_modules`` of SGLang's forms: NAME=PATH, a PATH that is its own name, an object with lora_name and
    lora_path, or a mapping of names to paths."""
    items = [value] if isinstance(value, str) else value
    if isinstance(items, Mapping) and "lora_path" not in items:
        items = [f"{name}={path}" for name, path in items.items()]
    modules = []
    for one in [items] if isinstance(items, Mapping) else items:
        found = json.loads(one) if isinstance(one, str) and one.startswith("{") else one
        if isinstance(found, Mapping):
            found = f"{found['lora_name']}={found['lora_path']}"
        modules.append(found if "=" in found else f"{found}={found}")
    return {"enable_lora": True, "lora_modules": modules}


def to_graphs(value: Any) -> Mapping[str, Any]:
    """Return what ``compilation_config`` says of CUDA graphs; the rest of it is for torch.compile."""
    given = value if isinstance(value, Mapping) else {}
    if str(given.get("cudagraph_mode", "")).upper() in ("NONE", "0") or given.get("use_cudagraph") is False:
        return {"enforce_eager": True}
    sizes = given.get("cudagraph_capture_sizes")
    return {"cudagraph_capture_sizes": sizes} if sizes else {}


def to_attention(value: Any) -> Mapping[str, Any]:
    """Return the backend that ``attention_config`` names; the rest of it is how others compute."""
    backend = value.get("backend") if isinstance(value, Mapping) else None
    return {"attention_backend": backend} if backend else {}
