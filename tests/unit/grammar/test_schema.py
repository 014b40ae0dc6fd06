"""JSON schemas in words that the grammar library takes.  Oracle: ``jsonschema``, where nothing else is said."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from tests.unit.grammar.structured_cases import random_schema
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import CompiledGrammar, compile_grammar
from tp_engine.grammar.schema import lenient_schema, normal_schema, placed_schema
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}


def object_of(required: str = "", closed: bool = False, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(required)}
    return schema | ({"additionalProperties": False} if closed else {})


def compiled(schema: Any, *, closed: bool = False) -> CompiledGrammar:
    """The grammar, behind ``normal_schema``, which a schema goes through on its way to the library."""
    params = StructuredOutputsParams(json=schema, disable_additional_properties=closed)
    return compile_grammar(params, byte_vocabulary())


def follows(grammar: CompiledGrammar, value: Any) -> bool:
    """Whether the value is a whole output, in some order of its keys: a grammar asks for that of its schema."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else [value]
    return any(_follows(grammar, json.dumps(dict(one) if isinstance(value, dict) else one)) for one in orders)


def _follows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.start()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


VALUES: list[Any] = [
    *("", "a", "ab", "abc", 0, 1, 2, 1.5, None, True, [], [1], ["a"], ["a", "a"], [1, 1, 1], {}),
    *({"a": "x"}, {"b": "x"}, {"c": 1}, {"a": "x", "b": "x"}, {"a": 1}, {"a": "x", "c": 1}, {"kind": "cat"}),
    *(
        {"kind": "cat", "a": "x"},
        {"kind": "dog", "b": "x"},
        {"kind": "dog"},
        {"kind": "cat", "b": "x"},
        {"b": "x", "d": "x"},
    ),
    *({"k": "x"}, {"k": "y"}, {"k": "z"}, {"k": "x", "c": 1}),
]
# Schemas that say the same in words that the library does not take.
SAME: list[Any] = [
    *({"type": "string", "format": name} for name in ("path", "uuid4", "password", "binary", "byte", "regex", "phone")),
    {"format": "json-string"},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1},
    {"type": "string", "uniqueItems": True, "contains": False, "propertyNames": False},
    {"type": "array", "maxItems": 2.0, "minItems": 1.0},
    {"type": "string", "minLength": 2.0},
    {"type": "object", "minProperties": 1.0, "maxProperties": 1.0},
    {"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"enum": ["a", "c"]}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"enum": ["a"], "type": "string"}, "properties": {"a": STRING, "b": STRING}},
    {"type": "object", "dependentRequired": {"a": []}, "unevaluatedProperties": True},
    {"type": "array", "contains": INTEGER, "minContains": 0},
    {"type": "array", "minContains": 3},
    {"if": STRING, "type": "integer"},
    {"then": False, "else": False, "type": "integer"},
    {"not": False, "type": "integer"},
    {"$schema": "https://example.com/own", "type": "integer"},
    {"oneOf": [STRING, INTEGER, {"type": "null"}]},
    {"oneOf": [{"enum": ["a", "ab"]}, {"const": 1}]},
    {"oneOf": [object_of("a", a=STRING), object_of("b", b=STRING)]},
    {"oneOf": [object_of("a", a=STRING), object_of("b", b=STRING), object_of("c", c=INTEGER)]},
    {"oneOf": [object_of("a", True, a=STRING), object_of("ab", True, a=STRING, b=STRING)]},
    {"oneOf": [object_of("k", k={"const": "x"}), object_of(k={"const": "y"}), INTEGER]},
    {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {
            "Cat": object_of(kind={"const": "cat"}, a=STRING) | {"required": ["kind"]},
            "Dog": object_of(kind={"enum": ["dog", "wolf"]}, b=STRING) | {"required": ["kind"]},
        },
    },
    {
        "type": "object",
        "properties": {"a": STRING, "b": STRING},
        "oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
    },
]  # fmt: skip


@pytest.mark.parametrize("schema", SAME, ids=json.dumps)
def test_other_words_are_taken(schema: Any) -> None:
    """What follows the grammar is valid, and what is valid follows it."""
    assert normal_schema(normal_schema(schema)) == normal_schema(schema)
    grammar = compiled(schema)
    for value in VALUES:
        assert follows(grammar, value) is is_valid(schema, value), value


def test_branches_exclude_each_other() -> None:
    """Objects that fit two branches never follow; whatever follows is valid.  Random branches, open and closed."""
    rng = random.Random(7)
    names, num_taken = "abc", 0
    for _ in range(80):
        branches = []
        for _ in range(rng.randint(2, 3)):
            own = rng.sample(names, rng.randint(1, 3))
            values = (STRING, INTEGER, {"const": "x"}, {"enum": ["y", 1]}, {"const": 1.0}, random_schema(rng, 1))
            required = "".join(name for name in names if rng.random() < 0.4)
            branches.append(object_of(required, rng.random() < 0.3, **{name: rng.choice(values) for name in own}))
        schema = {"oneOf": branches}
        try:
            grammar, narrow = compiled(schema), compiled(schema, closed=True)
        except RequestError:
            continue
        num_taken += 1
        for chosen in itertools.product((None, "x", "y", 1), repeat=len(names)):
            value = {name: one for name, one in zip(names, chosen, strict=True) if one is not None}
            assert not follows(grammar, value) or is_valid(schema, value), (schema, value)
            assert not follows(narrow, value) or follows(grammar, value), (schema, value)
    assert num_taken > 20


REFUSED: list[tuple[Any, str]] = [
    (object_of(tags={"type": "array", "uniqueItems": True}), "could not keep uniqueItems at /properties/tags"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"not": {}}, "B": {"if": {}}}}, r"could not keep not at /\$defs/A; leave"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "contains": {}}, "not keep dependentRequired at /; leave"),
    ({"oneOf": [STRING, {"type": "string", "minLength": 3}]}, "two branches of a oneOf.*anyOf"),
    ({"oneOf": [{"type": "number"}, INTEGER]}, "two branches of a oneOf"),
    ({"oneOf": [{"const": 2.0}, INTEGER]}, "two branches of a oneOf"),
    ({"oneOf": [object_of("a", a=STRING), object_of("ab", b=STRING)]}, "two branches of a oneOf"),
    ({"oneOf": [object_of(a=STRING), object_of("b", b=STRING)]}, "two branches of a oneOf"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=json.dumps)
def test_what_could_not_be_kept_is_refused(schema: Any, words: str) -> None:
    """Oracle: the keyword, its place and the remedy, by hand; no option that does not exist."""
    with pytest.raises(RequestError, match=words) as caught:
        compiled(schema)
    assert "coerce" not in str(caught.value) and "Unimplemented" not in str(caught.value)


# A reference to what a lenient schema leaves out, or has elsewhere.
MOVED: list[Any] = [
    {"type": "object", "properties": {"a": {"$ref": "#/components/A"}}, "components": {"A": STRING}},
    {"oneOf": [STRING, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]},
]


@pytest.mark.parametrize("schema", [*SAME, *(schema for schema, _ in REFUSED), *MOVED], ids=json.dumps)
def test_lenient_schemas_allow_more(schema: Any) -> None:
    """Every valid value follows."""
    lenient = lenient_schema(schema)
    assert lenient_schema(lenient) == lenient
    grammar = compiled(lenient)
    for value in VALUES:
        assert follows(grammar, value) or not is_valid(schema, value), value


def test_a_schema_inside_of_another_one() -> None:
    """Oracle: the same values as on its own; references by pointer, to the root, and by the schema's own id."""
    schema = {
        "$id": "https://example.com/s",
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"$ref": "https://example.com/s#/$defs/A"},
            "deep": {"$ref": "#"},
        },
        "additionalProperties": False,
        "$defs": {"A": {"enum": ["#/x", "$ref"], "default": {"$ref": "#/y"}}},
    }
    whole: dict[str, Any] = {
        "$defs": {"one": placed_schema(schema, "/$defs/one")},
        "type": "array",
        "items": {"$ref": "#/$defs/one"},
    }
    own, inner = compiled(schema), compiled(whole)
    for value in ({}, {"a": "#/x"}, {"b": "$ref"}, {"deep": {"a": "#/x"}}, {"a": "x"}, {"deep": 1}, {"c": 1}):
        assert _follows(inner, json.dumps([value])) is follows(own, value) is is_valid(schema, value), value
    assert whole["$defs"]["one"]["$defs"]["A"]["default"] == {"$ref": "#/y"}
