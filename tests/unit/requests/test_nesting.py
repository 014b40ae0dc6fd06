"""Constraints that are too deep or too long are refused before any compiler sees them, in linear time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tp_engine.errors import RequestError
from tp_engine.requests.nesting import is_expression_deeper, is_grammar_deeper, is_schema_deeper
from tp_engine.requests.structured_outputs import (
    MAX_CHOICES,
    MAX_CONSTRAINT_CHARACTERS,
    MAX_NESTING,
    StructuredOutputsParams,
)

LONG = MAX_CONSTRAINT_CHARACTERS


def chain(levels: int) -> dict[str, Any]:
    """Each definition refers to the next: two steps down for each, the keyword's object and the reference."""
    parts = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{levels}": {}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        (nested(7), 8),
        (chain(5), 12),
        ({"anyOf": [{"type": "string"}, {"items": {}}]}, 4),
        ({"anyOf": [{"$ref": "#"}]}, 3),
        ({"$defs": {"a/b": [{}, {"not": {"not": {}}}]}, "$ref": "#/$defs/a~1b/1"}, 4),
        ({"$ref": "#/a/7"}, 1),
        ({"$ref": "http://x/y#/z"}, 1),
        ({"properties": {"$ref": {"type": "string"}}}, 3),
    ],
)
def test_depth_of_schemas(schema: Any, depth: int) -> None:
    """Oracle: by hand."""
    assert is_schema_deeper(schema, depth - 1) and not is_schema_deeper(schema, depth)


@pytest.mark.parametrize(
    ("grammar", "depth"),
    [
        ('start: a\na: b "c: d"\nb: "x"', 3),
        ('start: a | start\na: "start" // b\nb: c\nc: "x"', 2),
        ('root ::= "(" root ")" | item\nitem ::= [a-z]+ item?', 2),
        ('start: ((("a")))', 3),
        ('?start: x.y\nx.2: "a"\ny: T\nT: /[(]b/', 3),
        ('other: "a"', 0),
    ],
)
def test_depth_of_rules(grammar: str, depth: int) -> None:
    """Oracle: by hand, in both notations; names in texts and comments are none."""
    assert (depth == 0 or is_grammar_deeper(grammar, depth - 1)) and not is_grammar_deeper(grammar, depth)


@pytest.mark.parametrize(
    ("regex", "depth"), [("((a)|(b))", 2), (r"\(\(a[(()]", 0), ("([", 1), ("a{2}(b)", 1), ("[]()]", 0)]
)
def test_depth_of_expressions(regex: str, depth: int) -> None:
    """Oracle: by hand; escaped brackets and those in classes do not count."""
    assert (depth == 0 or is_expression_deeper(regex, depth - 1)) and not is_expression_deeper(regex, depth)


@pytest.mark.parametrize("part", ['\\"', "[", "a", "/\\/", "'", "a:\n", "()"])
def test_long_texts_take_linear_time(part: str) -> None:
    """Oracle: an end; quadratic time would be hours."""
    text = '"' * (part == '\\"') + part * (LONG // len(part))
    assert isinstance(is_grammar_deeper(text, MAX_NESTING), bool)
    assert isinstance(is_expression_deeper(text, MAX_NESTING), bool)


def test_references_to_the_same_parts_take_linear_time() -> None:
    """Oracle: an end; each of 300 references leads to all of 30,000 parts."""
    inner: Any = [{"type": "string"} for _ in range(30_000)]
    for _ in range(300):
        inner = {"a": inner}
    references = [{"$ref": "#/deep" + "/a" * count} for count in range(300)]
    assert not is_schema_deeper({"allOf": references, "deep": inner}, MAX_NESTING)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json": chain(MAX_NESTING)}, "the JSON schema has more than 500 objects, lists and references within"),
        (
            {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(600)) + 'r600: "a"'},
            "the grammar has",
        ),
        ({"regex": "(" * 600 + ")" * 600}, "the regex has more than 500 groups within each other; make it flatter"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "choice has 50001 texts; at most 50000 are allowed"),
    ],
)
def test_what_is_too_deep_or_too_long_is_refused(params: dict[str, Any], words: str) -> None:
    """Oracle: the words, with the limit."""
    constraint = StructuredOutputsParams(**params)
    with pytest.raises(RequestError, match=words) as caught:
        constraint.check_bounds()
    assert caught.value.param == "structured_outputs"


def test_real_sizes_pass() -> None:
    """Oracle: no error."""
    words = [f"word {i}" for i in range(MAX_CHOICES)]
    for fields in ({"json": json.dumps(chain(200))}, {"choice": words}, {"grammar": 'start: "a" start?'}):
        StructuredOutputsParams(**fields).check_bounds()
