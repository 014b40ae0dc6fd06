"""JSON schemas as the grammar library takes them.

* ``normal_schema`` allows the same values, or fewer: keywords that assert nothing are left out
  (``uniqueItems: false``, an unknown ``format``, keywords for other types), ``maxItems: 2.0`` is 2, and ``oneOf`` is
  ``anyOf`` where its branches exclude each other.
* ``lenient_schema`` allows the same values, or more: keywords that cannot be kept, or read, are left out.
* ``unkept_keywords`` are what the library refuses, and where.
* ``object_schema`` allows objects only.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from tp_engine.grammar.one_of import ExclusiveBranches
from tp_engine.grammar.schema_types import (
    OBJECT,
    OF_NUMBERS,
    OTHER_TYPE_NAMES,
    TYPES,
    SchemaRoot,
    given_types,
)

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = frozenset({"additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else",
                  "propertyNames", "unevaluatedProperties", "unevaluatedItems"})  # fmt: skip
_SEVERAL = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
# Keywords that assert nothing.
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
_MAX_LIMIT = 2**53
_RANGES = tuple(itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))) + tuple(
    (f"min{what}", f"max{what}") for what in ("Items", "Length", "Properties")
)
# The types that a keyword is about; it asserts nothing about others.
_ABOUT: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), frozenset({"string"})),
    **dict.fromkeys(("multipleOf", *_LIMITS), OF_NUMBERS),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
         "maxContains", "unevaluatedItems"), frozenset({"array"})),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
         "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        frozenset({"object"})),
}  # fmt: skip
# Keywords that the library knows but cannot enforce.
_UNKEPT = frozenset({"uniqueItems", "not", "if", "then", "else", "propertyNames", "contains", "minContains",
                     "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
                     "unevaluatedItems", "$dynamicRef", "$recursiveRef"})  # fmt: skip
_OFTEN_EMPTY = _UNKEPT | {"format", "$schema"}
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_DRAFTS = re.compile(r"https?://json-schema\.org/")
_MAX_PATTERN = 500
_LONGEST_POINTER = 200
# Expressions that the library certainly reads; ``re`` finds unbalanced brackets.
_ESCAPE = r"\\(?:[dDwWsSnrtfv]|[^0-9A-Za-z<>]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"
_PLAIN_PATTERN = re.compile(
    rf"(?:[^\\\[\](){{}}?*+]|{_ESCAPE}|\[\^?(?:[^\\\[\]&~-]|-(?!-)|{_ESCAPE})++\]|\((?:\?:|(?!\?))|\)|[?*+]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})*+",
    re.DOTALL,
)

Schema = Mapping[str, Any]
# A path down a schema: the place of the schema around it, and the names from there.
_Place: TypeAlias = tuple[Any, tuple[str, ...]] | None


def normal_schema(schema: Any) -> Any:
    """``schema`` in keywords that the library takes; other faults are left for the library to refuse."""
    branches = ExclusiveBranches(SchemaRoot(schema))
    return rewritten(schema, lambda node: branches.changed(_normal(node)))


def lenient_schema(schema: Any) -> Any:
    """``schema`` without what the library would refuse, for outputs that need not follow it."""
    root = SchemaRoot(schema)
    found = rewritten(schema, lambda node: _lenient(_normal(node), root))
    kept = SchemaRoot(found)  # without definitions under unknown keywords, such as "components"
    return rewritten(found, lambda node: _with_found_reference(dict(node), kept))


def object_schema(schema: Any) -> dict[str, Any] | None:
    """``schema`` for objects only, as arguments are; None if it allows no object."""
    if schema is True:
        return {"type": "object"}
    types = SchemaRoot(schema).allowed_types(schema)
    if not isinstance(schema, Mapping) or (types is not None and "object" not in types):
        return None
    return dict(schema) if types == OBJECT else {**schema, "type": "object"}


def placed_schema(schema: Any, place: str) -> Any:
    """``schema`` as a part of a larger one, at its JSON pointer ``place``, to which references are moved."""
    own_id = schema.get("$id") if isinstance(schema, Mapping) else None

    def moved(node: Schema) -> dict[str, Any]:
        found = {name: value for name, value in node.items() if name != "$id" or value != own_id}
        reference = found.get("$ref")
        if isinstance(reference, str):
            if isinstance(own_id, str) and own_id:
                reference = reference.removeprefix(own_id.rstrip("#")) or "#"
            found["$ref"] = f"#{place}{reference[1:]}" if reference == "#" or reference.startswith("#/") else reference
        return found

    return rewritten(schema, moved)


def unkept_keywords(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the keywords that the library cannot enforce, each with the JSON pointer of its schema, cut if it is long;
    unused definitions are not looked at."""
    root = SchemaRoot(schema)
    seen = set[int]()
    open_nodes: list[tuple[Any, _Place]] = [(schema, None)]
    while open_nodes:
        node, place = open_nodes.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield from ((name, _pointer(place)) for name in node if name in _UNKEPT)
        open_nodes += [(one, (place, way)) for name, way, one in inner_schemas(node) if name not in _DEFINITIONS]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            steps = reference[2 : 2 * _LONGEST_POINTER].replace("~1", "/").replace("~0", "~")
            open_nodes.append((root.referenced(reference), (None, tuple(steps.split("/")) if steps else ())))


def _pointer(place: _Place) -> str:
    """The JSON pointer of a place, cut: all names of a long path may take more memory than the schema."""
    parts: list[str] = []
    while place is not None:
        place, way = place
        parts += reversed(way)
    text = ""
    while parts and len(text) <= _LONGEST_POINTER:
        text += "/" + parts.pop()[:_LONGEST_POINTER].replace("~", "~0").replace("/", "~1")
    return (text if len(text) <= _LONGEST_POINTER else text[:_LONGEST_POINTER] + "...") or "/"


def rewritten(schema: Any, change: Callable[[Schema], dict[str, Any]]) -> Any:
    """A copy in which every schema is changed, inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _SEVERAL and isinstance(value, list):
            found[name] = [rewritten(one, change) for one in value]
        elif name in _BY_NAME and isinstance(value, Mapping):
            found[name] = {key: rewritten(one, change) for key, one in value.items()}
        elif name in _ONE:
            found[name] = rewritten(value, change)
    return change(found)


def inner_schemas(node: Schema) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """The schemas directly inside of ``node``: keyword, path, and schema."""
    for name, value in node.items():
        if name in _SEVERAL and isinstance(value, list):
            yield from ((name, (name, str(place)), one) for place, one in enumerate(value))
        elif name in _BY_NAME and isinstance(value, Mapping):
            yield from ((name, (name, key), one) for key, one in value.items())
        elif name in _ONE:
            yield name, (name,), value


def _normal(node: Schema) -> dict[str, Any]:
    """``node`` without what asserts nothing, and with numbers as the library writes them."""
    found = {name: _whole(value) if name in _COUNTS else value for name, value in node.items()}
    types = given_types(found)
    for name in list(found):
        about = _ABOUT.get(name)
        if name in _OFTEN_EMPTY and (
            (about is not None and types is not None and not about & types) or _asserts_nothing(name, found)
        ):
            del found[name]
    return _with_named_properties(found)


def _whole(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _asserts_nothing(name: str, node: Schema) -> bool:
    value = node[name]
    match name:
        case "uniqueItems":
            return value is False or node.get("maxItems") in (0, 1)
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "$schema":
            return not (isinstance(value, str) and _DRAFTS.match(value))
        case "not":
            return value is False
        case "if":
            return "then" not in node and "else" not in node
        case "then" | "else":
            return "if" not in node or is_any(value)
        case "contains":
            return node.get("minContains") == 0 and "maxContains" not in node
        case "minContains" | "maxContains":
            return "contains" not in node
        case "propertyNames":
            return is_any(value) or (isinstance(value, Mapping) and without_notes(value) == {"type": "string"})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, Mapping) and all(one == [] or is_any(one) for one in value.values())
    return name.startswith("unevaluated") and is_any(value)


def is_any(schema: Any) -> bool:
    """Whether ``schema`` allows every value."""
    return schema is True or (isinstance(schema, Mapping) and not without_notes(schema))


def without_notes(schema: Schema) -> dict[str, Any]:
    """The keywords of ``schema`` that assert something."""
    return {name: value for name, value in schema.items() if name not in NOTES}


def _with_named_properties(node: dict[str, Any]) -> dict[str, Any]:
    """``propertyNames`` that lists names, as for a mapping with literal keys, as properties."""
    names = node.get("propertyNames")
    listed = names.get("enum") if isinstance(names, Mapping) else None
    properties, others = node.get("properties", {}), node.get("additionalProperties", True)
    if (
        not isinstance(listed, list)
        or not isinstance(properties, Mapping)
        or "patternProperties" in node
        or not without_notes(names or {}).keys() <= {"enum", "type"}
    ):
        return node
    known = {name: properties.get(name, others) for name in listed if isinstance(name, str)}
    rest = {name: value for name, value in node.items() if name != "propertyNames"}
    return rest | {"properties": known, "additionalProperties": False}


def _lenient(node: dict[str, Any], root: SchemaRoot) -> dict[str, Any]:
    """The keywords of ``node`` that the library certainly takes."""
    if "oneOf" in node:
        node.setdefault("anyOf", node["oneOf"])
    found = {name: value for name, value in node.items() if _is_taken(name, value, root)}
    if isinstance(node.get("type"), str) and node["type"].lower() in OTHER_TYPE_NAMES:
        found["type"] = OTHER_TYPE_NAMES[node["type"].lower()]
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
    if "required" in found:
        is_closed = found.get("additionalProperties") is False and not found.get("patternProperties")
        known = found.get("properties", {})
        found["required"] = [name for name in found["required"] if known.get(name, not is_closed) is not False]
    for least, most in _RANGES:
        if least in found and most in found and found[least] > found[most]:
            del found[least], found[most]
    return {} if root.allowed_types(found) == frozenset() else found


def _with_found_reference(node: dict[str, Any], root: SchemaRoot) -> dict[str, Any]:
    if "$ref" in node and not isinstance(root.referenced(node["$ref"]), (Mapping, bool)):
        del node["$ref"]
    return node


def _is_taken(name: str, value: Any, root: SchemaRoot) -> bool:
    if name in _COUNTS:
        return type(value) is int and value >= 0
    if name in _LIMITS:
        return isinstance(value, (int, float)) and (math.isfinite(value) and abs(value) <= _MAX_LIMIT)
    if name in _BY_NAME - _UNKEPT:
        return isinstance(value, Mapping) and (name != "patternProperties" or all(map(_is_plain, value)))
    match name:
        case "type":
            names = [value] if isinstance(value, str) else value
            return (
                isinstance(names, list) and bool(names) and all(isinstance(one, str) and one in TYPES for one in names)
            )
        case "enum" | "anyOf" | "allOf":
            return isinstance(value, list) and bool(value)
        case "prefixItems":
            return isinstance(value, list)
        case "required":
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        case "items":
            return isinstance(value, (Mapping, bool, list))
        case "additionalProperties" | "additionalItems":
            return isinstance(value, (Mapping, bool))
        case "multipleOf":
            return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        case "pattern":
            return isinstance(value, str) and _is_plain(value)
        case "format":
            return isinstance(value, str)
        case "$ref":
            return isinstance(value, str) and isinstance(root.referenced(value), (Mapping, bool))
    return name == "const"


def _is_plain(pattern: str) -> bool:
    """Whether the library certainly reads the regular expression."""
    if len(pattern) > _MAX_PATTERN or _PLAIN_PATTERN.fullmatch(pattern) is None:
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
