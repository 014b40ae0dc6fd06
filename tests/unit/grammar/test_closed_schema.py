"""Schemas whose objects are closed: which are, and that no value is allowed which the schema forbids."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest

from tp_engine.grammar.closed_schema import closed_schema

A, B, TEXT = {"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}, {"type": "string"}
POINT = {"type": "object", "properties": {"x": {}}}
# A schema -> values that stay allowed, and values that are not any more.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (A, [{"a": "1"}, {}, 5], [{"a": "1", "b": 1}]),
    ({"type": "object", **A, "required": ["a"]}, [{"a": "1"}], [{"a": "1", "b": 1}]),
    ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    ({"type": "object"}, [{"a": 1}], []),
    ({"type": "array", "items": A}, [[{"a": "1"}]], [[{"b": 1}]]),
    ({"anyOf": [A, B]}, [{"a": "1"}, {"b": "1"}], [{"c": 1}]),
    ({"$defs": {"p": POINT}, "properties": {"p": {"$ref": "#/$defs/p"}}}, [{"p": {"x": 1}}],
     [{"p": {"y": 1}}, {"q": 1}]),
    ({"$defs": {"p": POINT}, "allOf": [{"$ref": "#/$defs/p"}]}, [{"x": 1}], [{"y": 1}]),
    ({"patternProperties": {"^a": TEXT}}, [{"ab": "1"}], [{"b": 1}]),
    ({**A, "additionalProperties": True}, [{"b": 1}], []),
    ({**A, "additionalProperties": {"type": "integer"}}, [{"b": 1}], []),
    ({**A, "unevaluatedProperties": True}, [{"b": 1}], []),
    ({**A, "required": ["b"]}, [{"a": "1", "b": 1}], []),
    ({**A, "minProperties": 2}, [{"a": "1", "b": 1}], []),
    ({**A, "propertyNames": {"enum": ["a", "b"]}}, [{"a": "1", "b": 1}], []),
    ({"allOf": [A, B]}, [{"a": "1", "b": "1"}], []),
    ({**A, "anyOf": [B, {"required": ["a"]}]}, [{"a": "1", "b": "1"}], []),
    ({"$defs": {"p": POINT}, "$ref": "#/$defs/p", **A}, [{"a": "1", "x": 1}], []),
    ({"$defs": {"p": POINT, "q": {"$ref": "#/$defs/p"}}, "allOf": [{"$ref": "#/$defs/q"}, A]},
     [{"a": "1", "x": 1}], []),
    ({"oneOf": [{"type": "object", **A, "required": ["a"]}, {"type": "object", **B, "required": ["b"]}]},
     [{"a": "1"}, {"b": "1"}], [{"a": "1", "c": 1}]),
    ({"oneOf": [{"type": "object"}, {"type": "object", **B, "required": ["b"]}]}, [{"c": 1}], []),
    ({"oneOf": [{**A, "required": ["a"]}, B]}, [{"a": "1", "b": 5}, {"c": 1}], []),
    ({"if": A, "then": B, "properties": {"c": {}}}, [{"a": "1", "b": "1", "c": 1}], []),
    ({"allOf": [A, B], "items": A}, [[{"a": "1"}]], [[{"b": "1"}]]),
    ({"properties": {"properties": TEXT}}, [{"properties": "1"}], [{"a": "1"}, {"additionalProperties": False}]),
    ({"const": {"properties": 1}}, [{"properties": 1}], []),
    ({"properties": {"self": {"$ref": "#"}}}, [{"self": {"self": {}}}], [{"self": {"other": 1}}]),
    (True, [{"a": 1}], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "allowed", "closed_out"), CASES, ids=lambda one: json.dumps(one)[:70])
def test_which_objects_are_closed(schema: Any, allowed: list[Any], closed_out: list[Any]) -> None:
    """Oracle: ``jsonschema`` with both schemas, on values by hand."""
    before = json.dumps(schema)
    closed = jsonschema.Draft202012Validator(closed_schema(schema))
    for value in allowed:
        assert closed.is_valid(value), value
    for value in closed_out:
        assert jsonschema.Draft202012Validator(schema).is_valid(value) and not closed.is_valid(value), value
    assert json.dumps(schema) == before, "the client's schema is not changed"


def test_a_schema_of_many_parts_is_closed_in_linear_time() -> None:
    """Oracle: processor time per part, of definitions that all refer to each other; twice as many take about twice as
    long."""
    seconds = []
    for num_parts in (2000, 8000):
        parts = {str(one): {"$ref": f"#/$defs/{(one + 1) % num_parts}", **A} for one in range(num_parts)}
        schema = {"$defs": parts, "allOf": [{"$ref": f"#/$defs/{one}"} for one in range(num_parts)]}
        started_s = time.thread_time()
        closed_schema(schema)
        seconds.append(time.thread_time() - started_s)
    assert seconds[1] < 16 * seconds[0] + 0.5, seconds
