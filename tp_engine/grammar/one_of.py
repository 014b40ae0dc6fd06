"""Schemas with a ``oneOf`` whose branches exclude each other, so that ``anyOf`` says the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.grammar.schema_types import OBJECT, allowed_types, referenced

_MAX_BRANCHES = 50
_MAX_NAMES = 64
_MAX_REFERENCES = 8
_EXACT = (str, bool, int, type(None))


def with_exclusive_branches(node: dict[str, Any], root: Any) -> dict[str, Any]:
    """``anyOf`` in place of ``oneOf`` if each branch can be made to exclude the others.

    A branch for objects excludes another one if it forbids a property that the other one requires.
    """
    branches = node.get("oneOf")
    if not isinstance(branches, list) or "anyOf" in node or not 0 < len(branches) <= _MAX_BRANCHES:
        return node
    known = [_Branch.of(one, root) for one in branches]
    forbidden: list[set[str]] = [set() for _ in branches]
    for one, other in itertools.permutations(range(len(branches)), 2):
        if known[one].excludes(known[other]):
            continue
        extra = sorted(known[other].required - known[one].required)
        if not extra or not known[one].types == known[other].types == OBJECT:
            return node  # the library may know better
        forbidden[one].add(extra[0])
    narrowed = [
        {**one, "properties": {**one.get("properties", {}), **dict.fromkeys(sorted(names), False)}} if names else one
        for one, names in zip(branches, forbidden, strict=True)
    ]
    return {name: value for name, value in node.items() if name != "oneOf"} | {"anyOf": narrowed}


@dataclass(frozen=True, slots=True)
class _Branch:
    """What is known of one branch of a ``oneOf``."""

    types: frozenset[str] | None
    values: frozenset[str] | None
    properties: Mapping[str, Any]
    required: frozenset[str]
    is_closed: bool

    @classmethod
    def of(cls, schema: Any, root: Any) -> _Branch:
        resolved = schema
        for _ in range(_MAX_REFERENCES):
            if isinstance(resolved, Mapping) and isinstance(resolved.get("$ref"), str):
                resolved = referenced(root, resolved["$ref"])
        node = resolved if isinstance(resolved, Mapping) else {}
        properties, required = node.get("properties"), node.get("required")
        names = required[:_MAX_NAMES] if isinstance(required, list) else []
        return cls(
            types=allowed_types(schema, root),
            values=_values(node),
            properties=properties if isinstance(properties, Mapping) else {},
            required=frozenset(name for name in names if isinstance(name, str)),
            is_closed=node.get("additionalProperties") is False and not node.get("patternProperties"),
        )

    def excludes(self, other: _Branch) -> bool:
        """Return whether no value fits both."""
        if self.types is not None and other.types is not None and not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        if not (self.types == other.types == OBJECT):
            return False
        for name in self.required | other.required:
            mine, theirs = self._at(name), other._at(name)
            if (mine is not None and not mine) or (theirs is not None and not theirs):
                return True
            if mine is not None and theirs is not None and not mine & theirs:
                return True
        return False

    def _at(self, name: str) -> frozenset[str] | None:
        """The values that property ``name`` may have, as JSON; None if that is not known."""
        if name not in self.properties:
            return frozenset() if self.is_closed else None
        schema = self.properties[name]
        return frozenset() if schema is False else _values(schema) if isinstance(schema, Mapping) else None


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The values of a constant or an enumeration, as JSON; None if some can be written in several ways."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > _MAX_NAMES:
        return None
    return frozenset(map(json.dumps, values)) if all(isinstance(value, _EXACT) for value in values) else None
