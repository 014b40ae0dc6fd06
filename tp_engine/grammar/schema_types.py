"""What a JSON schema says about the types of its values."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
OBJECT = frozenset({"object"})
OF_NUMBERS = frozenset({"integer", "number"})
# What careless writers say instead.
OTHER_TYPE_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object",
                    "list": "array", "none": "null"}  # fmt: skip
_MAX_LOOKS = 64


def allowed_types(schema: Any, root: Any, seen: set[int] | None = None) -> frozenset[str] | None:
    """Return the types of the values that a schema allows, as far as it says so; None if it does not.

    Looks at ``_MAX_LOOKS`` schemas at most.
    """
    seen = set() if seen is None else seen
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > _MAX_LOOKS:
        return None
    seen.add(id(schema))
    found = [given_types(schema)]
    if isinstance(schema.get("$ref"), str):
        found.append(allowed_types(referenced(root, schema["$ref"]), root, seen))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found.append(_numbers_alike(name for value in values for name in types_of(value)))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            each = [allowed_types(one, root, seen) for one in schema[keyword]]
            found.append(None if None in each else frozenset(name for types in each for name in types or ()))
    if isinstance(schema.get("allOf"), list):
        found += [allowed_types(one, root, seen) for one in schema["allOf"]]
    known = [types for types in found if types is not None]
    return frozenset.intersection(*known) if known else None


def given_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that ``type`` names."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    known = {OTHER_TYPE_NAMES.get(str(name).lower(), str(name)) for name in names}
    return _numbers_alike(known) if known <= TYPES else None


def _numbers_alike(names: Iterable[str]) -> frozenset[str]:
    """``names``, where a number may be an integer."""
    found = frozenset(names)
    return found | OF_NUMBERS if "number" in found else found


def types_of(value: Any) -> tuple[str, ...]:
    """Return the types that a JSON value has."""
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


def referenced(root: Any, reference: str) -> Any:
    """Return what a reference such as ``#/$defs/city`` means, None if it can not be found."""
    found = root
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    for escaped in reference[2:].split("/"):
        step = unquote(escaped).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found
