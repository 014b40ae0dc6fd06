"""What a JSON schema says about the types of its values, and what its references point to."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
OBJECT = frozenset({"object"})
OF_NUMBERS = frozenset({"integer", "number"})
# What careless authors write instead.
OTHER_TYPE_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object",
                    "list": "array", "none": "null"}  # fmt: skip
_MAX_DEPTH = 64
_LONGEST_REFERENCE = 4096
_MOST_VALUES = 10_000


class SchemaRoot:
    """A whole schema, in which references are looked up.  Each part is looked at once, however many refer to it, so all
    answers together take time linear in the size of the schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[str, Any] = {}
        # With the node itself: while it is kept, no other object has its id.
        self._types: dict[int, tuple[Any, frozenset[str] | None]] = {}

    def referenced(self, reference: str) -> Any:
        """What a reference such as ``#/$defs/city`` points to; None if it cannot be found, or is very long."""
        if reference not in self._found:
            self._found[reference] = self._look_up(reference) if len(reference) <= _LONGEST_REFERENCE else None
        return self._found[reference]

    def allowed_types(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        """The types of the values that a schema allows; None if it does not say.

        A schema that refers to itself says nothing there, nor does one that is nested too deeply.
        """
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if id(schema) not in self._types:
            self._types[id(schema)] = schema, None
            self._types[id(schema)] = schema, self._types_of(schema, depth + 1)
        return self._types[id(schema)][1]

    def _types_of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str] | None:
        found = [given_types(schema)]
        if isinstance(schema.get("$ref"), str):
            found.append(self.allowed_types(self.referenced(schema["$ref"]), depth))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and len(values) <= _MOST_VALUES:
            found.append(_numbers_alike(name for value in values for name in types_of(value)))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                each = [self.allowed_types(one, depth) for one in schema[keyword]]
                found.append(None if None in each else frozenset(name for types in each for name in types or ()))
        if isinstance(schema.get("allOf"), list):
            found += [self.allowed_types(one, depth) for one in schema["allOf"]]
        known = [types for types in found if types is not None]
        return frozenset.intersection(*known) if known else None

    def _look_up(self, reference: str) -> Any:
        found = self._root
        if reference == "#":
            return found
        if not reference.startswith("#/"):
            return None
        for escaped in reference[2:].split("/"):
            step = unquote(escaped).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isascii() and step.isdigit() and len(step) < 8:
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, Mapping) else None
        return found


def given_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that the keyword ``type`` names; None without them."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or len(names) > _MOST_VALUES or not all(isinstance(name, str) for name in names):
        return None
    known = {OTHER_TYPE_NAMES.get(str(name).lower(), str(name)) for name in names}
    return _numbers_alike(known) if known <= TYPES else None


def _numbers_alike(names: Iterable[str]) -> frozenset[str]:
    """``names``, with integers among numbers."""
    found = frozenset(names)
    return found | OF_NUMBERS if "number" in found else found


def types_of(value: Any) -> tuple[str, ...]:
    """The types that a JSON value has."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)
