"""Schemas with a ``oneOf`` whose branches exclude each other, so that ``anyOf`` means the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.grammar.schema_types import OBJECT, SchemaRoot

_MAX_BRANCHES = 50
_MAX_NAMES = 64
_MAX_REFERENCES = 8
_EXACT = (str, bool, int, type(None))


class ExclusiveBranches:
    """Replaces ``oneOf`` with ``anyOf`` within one schema; branches that several refer to are compared once."""

    def __init__(self, root: SchemaRoot) -> None:
        self._root = root
        self._objects: dict[int, _Object] = {}
        self._excluding: dict[tuple[int, int], bool] = {}

    def changed(self, node: dict[str, Any]) -> dict[str, Any]:
        """``node`` with ``anyOf`` instead of ``oneOf``, if each branch can be made to exclude the others.

        A branch for objects excludes another if it forbids a property that the other requires.
        """
        branches = node.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in node or not 0 < len(branches) <= _MAX_BRANCHES:
            return node
        types = [self._root.allowed_types(one) for one in branches]
        known = [self._object(one) for one in branches]
        forbidden: list[set[str]] = [set() for _ in branches]
        for one, other in itertools.combinations(range(len(branches)), 2):
            mine, theirs = types[one], types[other]
            if mine is not None and theirs is not None and not mine & theirs:
                continue
            if self._exclude(known[one], known[other], are_objects=mine == theirs == OBJECT):
                continue
            for this, that in ((one, other), (other, one)):
                extra = sorted(known[that].required - known[this].required)
                if not extra or not mine == theirs == OBJECT:
                    return node  # the library may know better
                forbidden[this].add(extra[0])
        narrowed = [
            {**one, "properties": {**one.get("properties", {}), **dict.fromkeys(sorted(names), False)}}
            if names
            else one
            for one, names in zip(branches, forbidden, strict=True)
        ]
        return {name: value for name, value in node.items() if name != "oneOf"} | {"anyOf": narrowed}

    def _object(self, schema: Any) -> _Object:
        """What is known of a branch, references followed."""
        for _ in range(_MAX_REFERENCES):
            if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
                schema = self._root.referenced(schema["$ref"])
        if id(schema) not in self._objects:
            self._objects[id(schema)] = _Object.of(schema)
        return self._objects[id(schema)]

    def _exclude(self, one: _Object, other: _Object, *, are_objects: bool) -> bool:
        """Whether no value fits both."""
        if one.values is not None and other.values is not None and one.values.isdisjoint(other.values):
            return True
        pair = id(one), id(other)
        if are_objects and pair not in self._excluding:
            self._excluding[pair] = one.excludes(other)
        return are_objects and self._excluding[pair]


@dataclass(frozen=True, slots=True)
class _Object:
    """What is known of one branch of a ``oneOf``: its ``schema``, its values, the properties that it requires, and the
    values of its properties.  ``others`` are the values of properties that it does not name."""

    schema: Any
    values: frozenset[str] | None
    required: frozenset[str]
    properties: Mapping[str, frozenset[str] | None]
    others: frozenset[str] | None

    @classmethod
    def of(cls, schema: Any) -> _Object:
        node = schema if isinstance(schema, Mapping) else {}
        properties, required = node.get("properties"), node.get("required")
        named = properties if isinstance(properties, Mapping) else {}
        names = required[:_MAX_NAMES] if isinstance(required, list) else []
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        return cls(
            schema=schema,
            values=_values(node),
            required=frozenset(name for name in names if isinstance(name, str)),
            properties={name: _possible(one) for name, one in named.items()},
            others=frozenset() if is_closed else None,
        )

    def excludes(self, other: _Object) -> bool:
        """Whether no object fits both."""
        for name in self.required | other.required:
            mine = self.properties.get(name, self.others)
            theirs = other.properties.get(name, other.others)
            if mine == frozenset() or theirs == frozenset():
                return True
            if mine is not None and theirs is not None and mine.isdisjoint(theirs):
                return True
        return False


def _possible(schema: Any) -> frozenset[str] | None:
    """The values that a property may have, as JSON; None if that is not known."""
    return frozenset() if schema is False else _values(schema) if isinstance(schema, Mapping) else None


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The values of a constant or an enumeration, as JSON; None if some can be written in several ways."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > _MAX_NAMES:
        return None
    return frozenset(map(json.dumps, values)) if all(isinstance(value, _EXACT) for value in values) else None
