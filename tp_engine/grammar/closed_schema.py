"""Objects that have only the properties that their schema names, as in vLLM.

Otherwise a weak model invents properties until ``max_tokens``.  JSON Schema allows any, so a schema that says which
others there may be is kept, and so are parts that only together name all properties of an object: what ``allOf`` joins,
``anyOf`` or ``$ref`` beside properties, and branches of a ``oneOf`` that are not told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tp_engine.grammar.schema import inner_schemas, is_any, normal_schema, rewritten
from tp_engine.grammar.schema_types import SchemaRoot

_OF_OBJECTS = frozenset({"properties", "patternProperties", "required", "minProperties"})
# A schema with one of these says which other properties there may be.
_DECIDED = frozenset({"additionalProperties", "unevaluatedProperties", "propertyNames"})


def closed_schema(schema: Any) -> Any:
    """``normal_schema``, with ``additionalProperties: false`` wherever an object could otherwise have properties that
    its schema does not name.

    Branches of a ``oneOf`` are told apart first: a closed one would no longer exclude what it did.
    """
    copy = rewritten(normal_schema(rewritten(schema, _with_what_is_said)), dict)
    root = SchemaRoot(copy)
    nodes = list(_all_nodes(copy))
    together = _together(nodes, root)
    for node in nodes:
        if id(node) not in together and _is_open(node):
            node["additionalProperties"] = False
    return copy


def _with_what_is_said(node: Mapping[str, Any]) -> dict[str, Any]:
    """``node``, where ``unevaluatedProperties`` that allow all others are said by a keyword that ``normal_schema``
    keeps."""
    found = dict(node)
    if is_any(node.get("unevaluatedProperties", False)):
        found.setdefault("additionalProperties", True)
    return found


def _all_nodes(schema: Any) -> Iterator[dict[str, Any]]:
    open_nodes = [schema]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict):
            yield node
            open_nodes += [one for _, _, one in inner_schemas(node)]


def _is_open(node: Mapping[str, Any]) -> bool:
    """Whether a schema lists properties, among them all required ones, and says nothing of others."""
    known, required = node.get("properties", {}), node.get("required", [])
    if "properties" not in node and "patternProperties" not in node:
        return False
    if node.keys() & _DECIDED or not isinstance(known, Mapping) or not isinstance(required, list):
        return False
    if known and all(one is False for one in known.values()):  # those of other branches
        return False
    least = node.get("minProperties", 0)
    needs_more = isinstance(least, (int, float)) and least > len(known)
    return not needs_more and all(isinstance(name, str) and name in known for name in required)


def _together(nodes: list[dict[str, Any]], root: SchemaRoot) -> set[int]:
    """The ``id`` of schemas that describe one object together with others."""
    found = set[int]()
    for node in nodes:
        parts = _of_the_same_value(node, root)
        num_joined = len(node["allOf"]) if isinstance(node.get("allOf"), list) else 0
        num_joined += sum(name in node for name in ("$ref", "anyOf", "if", "dependentSchemas")) + 2 * ("oneOf" in node)
        if num_joined > 1 or (num_joined and node.keys() & _OF_OBJECTS):
            open_parts = [node, *parts]
            while open_parts:
                part = open_parts.pop()
                if isinstance(part, dict) and id(part) not in found:
                    found.add(id(part))
                    open_parts += _of_the_same_value(part, root)
    return found


def _of_the_same_value(node: Mapping[str, Any], root: SchemaRoot) -> list[Any]:
    """The schemas in ``node`` that describe the same value."""
    parts = [node[name] for name in ("if", "then", "else") if name in node]
    for name in ("allOf", "anyOf", "oneOf"):
        parts += node[name] if isinstance(node.get(name), list) else []
    if isinstance(node.get("dependentSchemas"), Mapping):
        parts += node["dependentSchemas"].values()
    if isinstance(node.get("$ref"), str):
        parts.append(root.referenced(node["$ref"]))
    return parts
