"""The schemas of forced tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.structured import json_schema_constraint
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary

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
    matcher = compile_grammar(json_schema_constraint(schema), byte_vocabulary()).start()
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


def test_definitions_that_contradict_each_other_are_refused() -> None:
    """Oracle: the error; equal definitions count as one."""
    assert follows(f"[{CALL}]", request("required", other=WEATHER))
    with pytest.raises(RequestError, match=r"define \$defs/City differently"):
        request("required", other=WEATHER | {"$defs": {"City": {"type": "string"}}}).schema()
