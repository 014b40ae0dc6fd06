"""Fields of configuration dataclasses: each is a flag, a key of a TOML table and a keyword of the Python API.

The three give a value in several forms: a size as text or as a number, a JSON object as text or as a mapping, several
names as a list or as one text.  ``check_fields`` brings each to the one form that the engine reads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.system.units import parse_bytes, parse_count

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """Return a field.  ``metadata`` says more about it:

    * ``choices``: its only values, which ``--help`` shows and errors name
    * ``flags``: other spellings of the flag; ``negative_flags``: spellings of its opposite
    * ``positive``: a number above 0; ``least`` and ``most``: its bounds.  A number with any of these is finite
    * ``size``, ``count``: a number that may be text, such as 2GiB or 32k
    * ``json``: a JSON object, kept as text; ``numbers``: whole numbers, kept as text such as 1,2,4
    * ``positional``: the value may stand without a flag; ``secret``: it is never shown
    * ``section``: a section of ``--help`` begins with this field
    * ``is_of_host``: a path or a habit of one host, which the other hosts of a job need not share
    """
    return field(default=default, metadata={"help": help_text, **metadata})


def key(default: Any, **metadata: Any) -> Any:
    """Return a field of a dataclass that an option's JSON object describes, with ``metadata`` of ``option``."""
    return option(default, "", **metadata)


def check_fields(config: Any, within: str = "") -> None:
    """Bring every field of the frozen dataclass ``config`` to its one form; None is the default.

    ``within``: the option whose JSON object ``config`` is.  Raises ``ConfigError`` for a value that is not of the
    field's type, outside of its bounds, or none of its choices.
    """
    try:
        _check_fields(config)
    except ConfigError as error:
        raise ConfigError(f"{within}: {error}" if within else str(error)) from error.__cause__


def _check_fields(config: Any) -> None:
    for spec in dataclasses.fields(config):
        given = getattr(config, spec.name)
        value = spec.default if given is None else _in_one_form(spec, given)
        object.__setattr__(config, spec.name, value)
        if value is not None:
            _check_type(spec, value)
            _check_bounds(spec, value)
            choices = spec.metadata.get("choices")
            if choices and value not in choices:
                raise ConfigError(f"{spec.name} is {value!r}; choose one of {', '.join(map(str, choices))}")


def json_object(name: str, text: str, known: Iterable[str] | None = None, *, example: str = "") -> dict[str, Any]:
    """Return the JSON object in the ``text`` of the option ``name``, without the keys that are null.  Raises
    ``ConfigError`` for other text, and for a key that is not among ``known``."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {shown(text)}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        such = f", such as {example}" if example else ""
        raise ConfigError(f"{name} is {shown(text)}; it must be a JSON object{such}")
    names = found.keys() if known is None else list(known)
    if unknown := sorted(found.keys() - set(names)):
        raise ConfigError(f"{name} names {shown(unknown[0])}; it can set {', '.join(names)}")
    return {key: value for key, value in found.items() if value is not None}


def is_switch(spec: dataclasses.Field[Any]) -> bool:
    """Return whether the field is on or off."""
    return base_type(spec) == "bool"


def base_type(spec: dataclasses.Field[Any]) -> str:
    """Return the field's annotation without None: ``str``, ``bool``, ``int``, ``float`` or ``tuple[str, ...]``."""
    return str(spec.type).removesuffix(" | None")


def _in_one_form(spec: dataclasses.Field[Any], value: Any) -> Any:
    kind, is_list = spec.metadata, isinstance(value, Sequence) and not isinstance(value, str)
    if kind.get("size") and isinstance(value, str):
        return parse_bytes(value)
    if kind.get("count") and isinstance(value, str):
        return parse_count(value)
    if kind.get("json") and isinstance(value, Mapping):
        return _json_text(spec.name, value)
    if kind.get("numbers") and is_list:
        return ",".join(map(str, value))
    if base_type(spec).startswith("tuple"):
        return _texts(spec, value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _texts(spec: dataclasses.Field[Any], value: Any) -> tuple[str, ...]:
    """Several texts from a list, from one text, or from one text that is a JSON list; objects become JSON text."""
    items = [value] if isinstance(value, (str, Mapping)) else value
    if isinstance(items, (tuple, list)) and len(items) == 1 and str(items[0]).lstrip().startswith("["):
        try:
            items = json.loads(items[0])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{spec.name} begins like a JSON list and is none: {error}") from error
    if isinstance(items, (tuple, list)):
        items = tuple(_json_text(spec.name, one) if isinstance(one, Mapping) else one for one in items)
        if all(isinstance(one, str) and one for one in items):
            return items
    raise ConfigError(f"{spec.name} is {_shown(spec, value)}; it must be texts, none of them empty")


def _json_text(name: str, value: Mapping[Any, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} can not be written as JSON: {error}") from error


def _check_type(spec: dataclasses.Field[Any], value: Any) -> None:
    kinds = _KINDS.get(base_type(spec), (object,))
    if isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool)):
        return
    rule = f"of type {spec.type}"
    if spec.metadata.get("json"):
        rule = "a JSON object, as a mapping or as text"
    elif spec.metadata.get("numbers"):
        rule = "whole numbers, as a list or as text such as 1,2,4"
    raise ConfigError(f"{spec.name} is {_shown(spec, value)} of type {type(value).__name__}; it must be {rule}")


def _check_bounds(spec: dataclasses.Field[Any], value: Any) -> None:
    is_positive, least, most = (spec.metadata.get(name) for name in ("positive", "least", "most"))
    if not is_positive and least is None:
        return
    low = 0 if is_positive else least
    if low <= value < math.inf and not (is_positive and value == 0) and (most is None or value <= most):
        return
    rule = ("positive" if most is None else "above 0") if is_positive else f"at least {least}"
    if most is not None or isinstance(value, float):
        rule += ", and finite" if most is None else f", and at most {most}"
    raise ConfigError(f"{spec.name} is {value}; it must be {rule}")


def _shown(spec: dataclasses.Field[Any], value: Any) -> str:
    return "not shown" if spec.metadata.get("secret") else shown(value)
