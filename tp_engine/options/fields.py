"""Fields of configuration dataclasses: each is a flag, a key of a TOML table and a keyword of the Python API.

The three give a value in several forms: a size as text or as a number, a JSON object as text or as a mapping, several
names as a list or as one text.  A dataclass that is ``checked`` brings each to the one form that the engine reads,
before the record is made.  Behind that door nothing is parsed again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

from tp_engine.errors import ConfigError, shown
from tp_engine.system.units import parse_bytes, parse_count

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}

_PLAIN = frozenset({bool, dict, float, int, list, str, tuple, type(None)})

Record = TypeVar("Record")


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """Return a field.  ``metadata`` says more about it:

    * ``choices``: its only values, which ``--help`` shows and errors name
    * ``flags``: other spellings of the flag; ``negative_flags``: spellings of its opposite
    * ``positive``: a number above 0; ``least`` and ``most``: its bounds.  A number with any of these is finite
    * ``besides``: a number outside of the bounds that is taken too; ``rule``: the bounds in words, for errors
    * ``size``, ``count``: a number that may be text, such as 2GiB or 32k
    * ``json``: a JSON object; the function that makes the field's value of its text, of a mapping, or of the value
    * ``numbers``: whole numbers, kept as text such as 1,2,4
    * ``several``: of a field with several values: the function that makes them of texts and mappings
    * ``told``: a key of a JSON object that is written even where it has its default
    * ``form``: the function that brings what a caller gives, None too, to the form that the field holds
    * ``derived``: the default where it follows from other fields, by a function of all of them
    * ``positional``: the value may stand without a flag; ``secret``: it is never shown
    * ``section``: a section of ``--help`` begins with this field
    * ``is_of_host``: a path or a habit of one host, which the other hosts of a job need not share
    """
    return field(default=default, metadata={"help": help_text, **metadata})


def key(default: Any, **metadata: Any) -> Any:
    """Return a field of a dataclass that an option's JSON object describes, with ``metadata`` of ``option``."""
    return option(default, "", **metadata)


def checked(within: str = "") -> Callable[[type[Record]], type[Record]]:
    """Return a decorator of frozen dataclasses whose constructor brings every value to its field's one form; None is
    the default.

    ``within``: the option whose JSON object the dataclass is.  The constructor raises ``ConfigError`` for a value that
    is not of the field's type, outside of its bounds, or none of its choices.
    """

    def decorate(kind: type[Record]) -> type[Record]:
        construct = kind.__init__
        specs = dataclasses.fields(kind)  # type: ignore[arg-type]  # dataclasses only

        @functools.wraps(construct)
        def construct_checked(self: Record, **given: Any) -> None:
            try:
                values = _in_one_form(specs, given)
            except ConfigError as error:
                raise ConfigError(f"{within}: {error}" if within else str(error)) from error.__cause__
            construct(self, **values)

        kind.__init__ = construct_checked  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def json_object(
    name: str, given: object, known: Iterable[str] | None = None, *, example: str = "", keeps_null: bool = False
) -> dict[str, Any]:
    """Return the JSON object that is ``given`` for the option ``name``, as text or as a mapping, without the keys that
    are null.  Raises ``ConfigError`` for anything else, and for a key that is not among ``known``."""
    if isinstance(given, Mapping):
        given = _json_text(name, given)
    elif not isinstance(given, str):
        raise ConfigError(
            f"{name} is {shown(given)} of type {type(given).__name__}; it must be a JSON object, as a mapping or as "
            "text"
        )
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is {shown(given)}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        such = f", such as {example}" if example else ""
        raise ConfigError(f"{name} is {shown(given)}; it must be a JSON object{such}")
    names = found.keys() if known is None else list(known)
    if unknown := sorted(found.keys() - set(names)):
        raise ConfigError(f"{name} names {shown(unknown[0])}; it can set {', '.join(names)}")
    return {key: value for key, value in found.items() if value is not None or keeps_null}


def plain(value: Any) -> Any:
    """Return the value of a field as plain data, from which the field can be made again: a record becomes the keys
    that differ from its defaults, as far as these suffice."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return [plain(one) for one in value] if isinstance(value, tuple) else value
    every = {spec.name: plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    every = {name: one for name, one in every.items() if one is not None}
    given = {
        spec.name: every[spec.name]
        for spec in dataclasses.fields(value)
        if spec.name in every and (getattr(value, spec.name) != spec.default or spec.metadata.get("told"))
    }
    of = getattr(value, "of", None)
    return every if of is None or of(given) != value else given


def unboxed(value: Any) -> Any:
    """Return ``value``; a number, an array or a series of numpy, torch or pandas as Python's."""
    return value.tolist() if type(value) not in _PLAIN and hasattr(value, "tolist") else value


def as_json(value: Any) -> str:
    """Return the JSON text of a field's value."""
    return json.dumps(plain(value), ensure_ascii=False)


def is_switch(spec: dataclasses.Field[Any]) -> bool:
    """Return whether the field is on or off."""
    return base_type(spec) == "bool"


def is_optional(spec: dataclasses.Field[Any]) -> bool:
    """Return whether None is a value of the field."""
    return str(spec.type).endswith(" | None")


def base_type(spec: dataclasses.Field[Any]) -> str:
    """Return the field's annotation without None, such as ``str``, ``bool``, ``int``, ``float`` or
    ``tuple[str, ...]``."""
    return str(spec.type).removesuffix(" | None")


def _in_one_form(specs: Iterable[dataclasses.Field[Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    values, derived = dict(given), []
    for spec in specs:
        value = given.get(spec.name)
        if value is None:
            value = spec.default
            if "derived" in spec.metadata:
                derived.append(spec)
        else:
            value = _value(spec, value)
        values[spec.name] = value
    for spec in derived:
        values[spec.name] = spec.metadata["derived"](values)
    return values


def problem(spec: dataclasses.Field[Any], value: Any) -> str | None:
    """Return what is wrong with the value of a field: it is not of the field's type, outside of its bounds, or none of
    its choices."""
    if reason := _wrong_type(spec, value) or _out_of_bounds(spec, value):
        return reason
    choices = spec.metadata.get("choices")
    if choices and value not in choices:
        return f"{spec.name} is {value!r}; choose one of {', '.join(map(str, choices))}"
    return None


def _value(spec: dataclasses.Field[Any], given: Any) -> Any:
    if make := spec.metadata.get("json"):
        return make(given)
    if base_type(spec).startswith("tuple"):
        return _several(spec, given)
    value = _single(spec, given)
    if reason := problem(spec, value):
        raise ConfigError(reason)
    return value


def _single(spec: dataclasses.Field[Any], value: Any) -> Any:
    kind, is_list = spec.metadata, isinstance(value, Sequence) and not isinstance(value, str)
    if kind.get("size") and isinstance(value, str):
        return parse_bytes(value)
    if kind.get("count") and isinstance(value, str):
        return parse_count(value)
    if kind.get("numbers") and is_list:
        return ",".join(map(str, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _several(spec: dataclasses.Field[Any], value: Any) -> tuple[Any, ...]:
    """Several values from a list, from one value, or from one text that is a JSON list."""
    make = spec.metadata.get("several")
    items = value if isinstance(value, (tuple, list)) else [value]
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith("["):
        try:
            items = json.loads(items[0])
        except ValueError as error:
            raise ConfigError(f"{spec.name} begins like a JSON list and is none: {error}") from error
    if make is not None:
        made: tuple[Any, ...] = make(items)
        return made
    if all(isinstance(one, str) and one for one in items):
        return tuple(items)
    raise ConfigError(f"{spec.name} is {_shown(spec, value)}; it must be texts, none of them empty")


def _json_text(name: str, value: Mapping[Any, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_of_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be written as JSON: {error}") from error


def _plain_of_json(value: Any) -> Any:
    found = unboxed(value)
    if found is value:
        raise TypeError(f"{shown(value)} is of type {type(value).__name__}")
    return found


def _wrong_type(spec: dataclasses.Field[Any], value: Any) -> str | None:
    base, rule = base_type(spec), spec.metadata.get("rule")
    kinds = _KINDS.get(base, (object,))
    if isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool)):
        return None
    if spec.metadata.get("numbers"):
        rule = "whole numbers, as a list or as text such as 1,2,4"
    elif rule and base == "float":
        rule = f"a number {rule}"
    rule = rule or f"of type {spec.type}"
    return f"{spec.name} is {_shown(spec, value)} of type {type(value).__name__}; it must be {rule}"


def _out_of_bounds(spec: dataclasses.Field[Any], value: Any) -> str | None:
    is_positive, least, most, rule, besides = map(spec.metadata.get, ("positive", "least", "most", "rule", "besides"))
    if (not is_positive and least is None) or (besides is not None and value == besides):
        return None
    low = 0 if is_positive else least
    if low <= value < math.inf and not (is_positive and value == 0) and (most is None or value <= most):
        return None
    if rule:
        return f"{spec.name} is {shown(value)}; it must be {rule}"
    rule = ("positive" if most is None else "above 0") if is_positive else f"at least {least}"
    if most is not None or isinstance(value, float):
        rule += ", and finite" if most is None else f", and at most {most}"
    return f"{spec.name} is {value}; it must be {rule}"


def _shown(spec: dataclasses.Field[Any], value: Any) -> str:
    return "not shown" if spec.metadata.get("secret") else shown(value)
