"""Parameters of requests: dataclasses whose fields are declared and checked as options are, with errors of requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

from tp_engine.errors import RequestError, shown
from tp_engine.options.fields import is_optional, key, problem, unboxed

Params = TypeVar("Params")

LARGEST = 2**31 - 1
_NUMBERS_AND_TEXTS = frozenset({int, str, float, bool})


def whole(default: Any, rule: str, least: int = 0, most: int = LARGEST, **metadata: Any) -> Any:
    """Return a field of whole numbers, whose bounds ``rule`` says in words."""
    return key(default, least=least, most=most, rule=rule, **metadata)


def number(default: float, rule: str, least: float, most: float) -> Any:
    """Return a field of numbers, whose bounds ``rule`` says in words."""
    return key(default, least=least, most=most, rule=rule)


def switch(default: bool) -> Any:
    """Return a field that is on or off."""
    return key(default, rule="True or False")


def takes_forms(kind: type[Params]) -> type[Params]:
    """Have the constructor of a dataclass bring each value that is given to the ``form`` of its field, and arrays and
    numbers of numpy to Python's."""
    construct = kind.__init__
    forms: Mapping[str, Callable[[Any], Any]] = {
        spec.name: spec.metadata["form"]
        for spec in dataclasses.fields(kind)  # type: ignore[arg-type]  # dataclasses only
        if "form" in spec.metadata
    }

    @functools.wraps(construct)
    def construct_in_form(self: Params, *positional: Any, **given: Any) -> None:
        for name, value in given.items():
            given[name] = value = unboxed(value)
            if name in forms:
                given[name] = forms[name](value)
        construct(self, *positional, **given)

    kind.__init__ = construct_in_form  # type: ignore[method-assign, assignment]
    return kind


def check_params(params: Any) -> None:
    """Raise ``RequestError`` for the first value that breaks the rule of its field."""
    for spec in _specs(type(params)):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(params, spec.name)
        if value is spec.default or (value is None and is_optional(spec)):
            continue
        if reason := problem(spec, value):
            raise RequestError(reason, param=spec.name)


def describe(kind: type[Any], properties: Mapping[str, dict[str, Any]]) -> None:
    """Write the bounds of the fields of ``kind`` into the JSON schema's properties of the same names."""
    for spec in _specs(kind):  # type: ignore[arg-type]  # classes are hashable
        if (schema := properties.get(spec.name)) is not None and "least" in spec.metadata:
            schema["description"] = f"Must be {spec.metadata['rule'].replace('None', 'null')}."


def as_tuple(name: str) -> Callable[[object], tuple[Any, ...]]:
    """Return the form of a field with several values: a tuple, which cannot change after the checks; None is empty."""

    def form(value: object) -> tuple[Any, ...]:
        found = () if value is None else several(value)
        if found is None:
            raise wrong_type(name, value, "a list")
        return found

    return form


def several(value: object) -> tuple[Any, ...] | None:
    """Return the values of a list, a set, a range or another iterable, with numbers of other libraries as Python's;
    None for a text, a mapping and what is no iterable."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    found = tuple(value)
    return found if {*map(type, found)} <= _NUMBERS_AND_TEXTS else tuple(map(unboxed, found))


def wrong_type(name: str, value: object, rule: str) -> RequestError:
    """Return the error of a value of another type."""
    return RequestError(f"{name} is {shown(value)} of type {type(value).__name__}; it must be {rule}", param=name)


@functools.cache
def _specs(kind: Hashable) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(
        spec
        for spec in dataclasses.fields(cast(Any, kind))
        if spec.metadata.get("rule") or spec.metadata.get("choices")
    )
