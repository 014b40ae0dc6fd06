"""The schemas of forced tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams

# As pydantic writes them, with references from the root.
CITY = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"], "additionalProperties": False}
WEATHER: dict[str, Any] = {
    "$defs": {"City": CITY},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def request(choice: Any, *, other: dict[str, Any] | None = None, **fields: Any) -> ToolRequest:
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "time", **({"parameters": other} if other else {})}},
    ]
    body = ChatBody(messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice, **fields)
    found = ToolRequest.of(body)
    assert found is not None
    return found


def follows(text: str, tools: ToolRequest) -> bool:
    """Whether ``text`` is a whole output."""
    schema = tools.schema()
    assert schema is not None
    matcher = compile_grammar(StructuredOutputsParams(json=schema), byte_vocabulary()).start()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.is_over or matcher.accept(256))


CALL = '{"name": "weather", "parameters": {"city": {"n": "Köln"}}}'
TIME = '{"name": "time", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "several", "one"),
    [
        (f"[{CALL}]", True, True),
        (f"[{CALL}, {TIME}]", True, False),
        ("[]", False, False),
        (CALL, False, False),
        ('[{"name": "weather", "parameters": {}}]', False, False),
        ('[{"name": "time", "parameters": {"a": 1}}]', False, False),
        ('[{"name": "other", "parameters": {}}]', False, False),
    ],
)
def test_required(text: str, several: bool, one: bool) -> None:
    """Oracle: by hand: at least one call of a tool with its parameters; at most one if only one is wanted."""
    assert follows(text, request("required")) is several
    assert follows(text, request("required", parallel_tool_calls=False)) is one


def test_a_named_function() -> None:
    """Oracle: the tool's parameters alone; no schema for a free choice."""
    assert follows('{"city": {"n": "x"}}', request(NAMED)) and not follows("{}", request(NAMED))
    assert request("auto").schema() is None and request(None).choice == "auto"


def test_tools_may_define_the_same_name() -> None:
    """Oracle: by hand: each tool's references mean its own definitions, wherever they point to."""
    other = WEATHER | {"$defs": {"City": {"type": "integer"}}, "properties": {"city": {"$ref": "#/$defs/City"},
                       "again": {"$ref": "#/properties/city"}, "deep": {"$ref": "#"}}}  # fmt: skip
    asked = request("required", other=other)
    assert follows(f"[{CALL}]", asked)
    assert follows('[{"name": "time", "parameters": {"city": 1, "again": 2, "deep": {"city": 3}}}]', asked)
    assert not follows('[{"name": "time", "parameters": {"city": {"n": "x"}}}]', asked)


NO_OBJECTS: list[Any] = [
    {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}}},
    {"type": ["object", "null"], "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"allOf": [{"properties": {"a": {"type": "boolean"}}}, {"required": ["a"]}]},
]
NEVER_OBJECTS: list[Any] = [
    {"type": "string"},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"type": "array"}}},
    {"enum": ["a", 1]},
    {"const": None},
]


def forms(schema: Any) -> Any:
    """The requests that name and require a tool with this schema, each with a wrapper of its arguments."""
    yield request({"type": "function", "function": {"name": "time"}}, other=schema), "{}"
    yield request("required", other=schema), '[{{"name": "time", "parameters": {}}}]'


@pytest.mark.parametrize("schema", [*NO_OBJECTS, *NEVER_OBJECTS, True], ids=str)
def test_arguments_are_objects(schema: Any) -> None:
    """Oracle: by hand: no other value fits, whatever the schema forgets to say; any object where it allows none."""
    for asked, wrapper in forms(schema):
        for value in ("true", "1", "null", '"x"', "[]", '"a"'):
            assert not follows(wrapper.format(value), asked), value
        assert follows(wrapper.format('{"a": true}'), asked)
        assert follows(wrapper.format("{}"), asked) is (schema not in NO_OBJECTS)


STRING: dict[str, Any] = {"type": "string"}
UNKEPT: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True, "items": STRING}, '["x", "y"]'),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, '{"abc": 1}'),
    ({"not": {"type": "null"}}, "1"),
    ({"if": STRING, "then": {"minLength": 2}}, '"ab"'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "{}"),
    ({"type": "array", "contains": STRING}, '["x"]'),
    ({"type": "string", "pattern": "^(?=.*x)[a-z]+$"}, '"x"'),
    ({"type": "string", "pattern": "("}, '"x"'),
    ({"type": "string", "pattern": "\\bx\\b"}, '"x"'),
    ({"type": "object", "patternProperties": {"(?!x)": {}}}, '{"a": 1}'),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1.5"),
    ({"type": "any"}, "1"),
    ({"type": "int"}, "1"),
    ({"type": "string", "enum": []}, '"x"'),
    ({"$ref": "https://example.com/schema"}, "1"),
    ({"$ref": "#/$defs/nothing"}, "1"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "1"),
    ({"type": "number", "minimum": 1e300}, "1"),
    ({"type": "object", "required": "a"}, "{}"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "{}"),
    ({"allOf": [STRING, {"type": "integer"}]}, "1"),
    ({"unevaluatedProperties": False, "$dynamicRef": "#x"}, "1"),
]


@pytest.mark.parametrize(("schema", "value"), UNKEPT, ids=str)
def test_what_a_grammar_can_not_keep_refuses_no_call(schema: dict[str, Any], value: str) -> None:
    """Oracle: a value by hand; the other arguments, and the innocent tool, are as strict as ever."""
    parameters = {"type": "object", "properties": {"x": schema, "n": {"type": "integer"}}, "required": ["x", "n"]}
    for asked, wrapper in forms(parameters):
        assert follows(wrapper.format(f'{{"x": {value}, "n": 1}}'), asked)
        assert not follows(wrapper.format(f'{{"x": {value}, "n": "1"}}'), asked)
        assert not follows(wrapper.format(f'{{"x": {value}}}'), asked)
    assert not follows('[{"name": "weather", "parameters": {}}]', request("required", other=parameters))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"x/y": {"type": "array", "uniqueItems": True}}}, r"uniqueItems at /properties/x~1y,"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"not": {}}}}, r"not at /\$defs/A,"),
        ({"type": "string"}, "allow no object"),
    ],
)
def test_a_strict_tool_is_refused_by_name(parameters: dict[str, Any], words: str) -> None:
    """Oracle: the tool, the keyword and its place; the same tool without ``strict`` is served."""
    for strict in (True, False, None):
        function = {"name": "f", "parameters": parameters, "strict": strict}
        tools = [{"type": "function", "function": one} for one in ({"name": "g"}, function)]
        fields = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
        asked = ToolRequest.of(ChatBody.model_validate(fields))
        assert asked is not None
        if strict:
            with pytest.raises(RequestError, match=words) as caught:
                asked.schema()
            assert caught.value.param == "tools" and "the parameters of 'f'" in str(caught.value)
        else:
            assert asked.schema() is not None


def test_a_strict_tool_may_have_definitions_that_nothing_uses() -> None:
    """Oracle: by hand; keywords that assert nothing are no keywords."""
    schema = {
        "type": "object",
        "$defs": {"A": {"not": {}}},
        "properties": {"a": {"type": "array", "uniqueItems": False}},
    }
    function = {"name": "f", "parameters": schema, "strict": True}
    asked = ToolRequest(tools=({"type": "function", "function": function},), choice="required")
    assert follows('[{"name": "f", "parameters": {"a": [1, 1]}}]', asked)
