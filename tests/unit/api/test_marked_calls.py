"""Calls whose arguments stand between marks: GLM, MiniMax and Qwen3-Coder; and values whose type a schema gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.api.test_tool_parsers import find
from tp_engine.api.openai.tools.argument_types import ArgumentTypes, json_value
from tp_engine.api.openai.tools.events import CallArguments, CallStarted
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.text_parser import TextParser

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "deep": {"type": "object"},
        "list": {"$ref": "#/$defs/list"},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "maybe": {"type": ["string", "null"]},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "level": {"enum": ["low", "high"]},
    },
    "$defs": {"list": {"type": "array"}},
}
TOOLS = ToolRequest(
    tools=tuple({"function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "größe")), choice="auto"
)
NAMES = ("glm45", "minimax_m2", "qwen3_coder")
Arguments = dict[str, str]


def parser(name: str) -> TextParser:
    return TOOL_FORMATS[name].new_parser(TOOLS)


def call(name: str, function: str, arguments: Arguments) -> str:
    """A call as the model's chat template writes it."""
    match name:
        case "glm45":
            pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
            return f"<tool_call>{function}\n{''.join(pairs)}</tool_call>"
        case "minimax_m2":
            pairs = [f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()]
            return f'<minimax:tool_call>\n<invoke name="{function}">\n{"".join(pairs)}</invoke>\n</minimax:tool_call>'
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={function}>\n{''.join(pairs)}</function>\n</tool_call>"


def every_split(name: str, text: str) -> Any:
    """The calls and text found in ``text``; every split must give the same."""
    whole = find(parser(name), [text])
    assert find(parser(name), text) == whole
    for first in range(len(text) + 1):
        assert find(parser(name), [text[:first], text[first:]]) == whole, text[:first]
        assert find(parser(name), [text[:first], text[first : first + 4], text[first + 4 :]]) == whole, text[:first]
    return whole


VALUES: list[tuple[str, str, Any]] = [
    ("city", "Zürich 😀", "Zürich 😀"),
    ("city", '  say "hi"\n\\ </tool> {', '  say "hi"\n\\ </tool> {'),
    ("city", "5", "5"),
    ("city", "", ""),
    ("city", "<parameter> \x01", "<parameter> \x01"),
    ("n", "-12", -12),
    ("n", "twelve", "twelve"),
    ("deep", '{"a": [1, {"b": "}"}], "ü": "<a>"}', {"a": [1, {"b": "}"}], "ü": "<a>"}),
    ("deep", "{'a': True}", {"a": True}),
    ("list", "[1, 2.50, null]", [1, 2.5, None]),
    ("list", "(1, 2)", [1, 2]),
    ("flag", "True", True),
    ("flag", "none", None),
    ("maybe", "null", None),
    ("maybe", "[1]", "[1]"),
    ("maybe", "12", "12"),
    ("either", "12", 12),
    ("either", "12 apples", "12 apples"),
    ("level", "low", "low"),
    ("unknown", "7", 7),
    ("unknown", "seven", "seven"),
    ("unknown", "NaN", "NaN"),
]


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str) -> None:
    """Oracle: values by hand, and JSON; no split changes them."""
    for key, text, value in VALUES:
        found = every_split(name, call(name, "add", {key: text}))
        [(function, arguments)] = found.calls
        assert (function, json.loads(arguments), found.content) == ("add", {key: value}, ""), (key, text)


@pytest.mark.parametrize("name", NAMES)
def test_calls_among_text(name: str) -> None:
    """Oracle: by hand."""
    one, other = call(name, "add", {"n": "1", "city": "Köln"}), call(name, "größe", {})
    calls = [("add", '{"n": 1, "city": "Köln"}'), ("größe", "{}")]
    for text, content, expected in (
        ("", "", []),
        (" just text, 1 < 2, <tool> \n", " just text, 1 < 2, <tool> \n", []),
        (f"I look.\n\n{one}\n{other}\n", "I look.", calls),
        (f"Before {one} after 中文 ", "Before  after 中文", calls[:1]),
        (f"{other}\n\nDone.", "Done.", calls[1:]),
        (call(name, "unheard_of", {"n": "1"}), "", [("unheard_of", '{"n": 1}')]),
    ):
        found = every_split(name, text)
        assert (found.content, found.calls) == (content, expected), text


BROKEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("glm45", "<tool_call>add</tool_call>", "", [("add", "{}")]),
    ("glm45", "<tool_call>add<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "", [("add", '{"n": 1}')]),
    ("glm45", "<tool_call>add\n<arg_key>n</arg_key>oops</tool_call>!", "!", [("add", "{}")]),
    ("glm45", "<tool_call>add\n<arg_key>n</arg_key><arg_value>1</tool_call>!", "!", [("add", '{"n": 1}')]),
    ("glm45", '<tool_call>{"name": "add"}\n</tool_call>', '<tool_call>{"name": "add"}\n</tool_call>', []),
    ("glm45", "<tool_call>\n</tool_call>x", "x", []),
    ("glm45", "<tool_call>add\n<arg_key>city</arg_key><arg_value>K", "", [("add", '{"city": "K"}')]),
    ("glm45", "<tool_call>add\n<tool_call>add\n</tool_call>", "", [("add", "{}"), ("add", "{}")]),
    ("qwen3_coder", "<function=add>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>!", "!",
     [("add", '{"n": 1}')]),
    ("qwen3_coder", "<function=f>(x)</function>", "<function=f>(x)</function>", []),
    ("qwen3_coder", "<function=add></function> and so on", " and so on", [("add", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK\n</function>\n</tool_call>", "",
     [("add", '{"city": "K"}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\n\n\nK\n\n</parameter></function></tool_call>", "",
     [("add", '{"city": "\\n\\nK\\n"}')]),
    ("qwen3_coder", "<tool_call>add()</tool_call>", "<tool_call>add()</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=add>\nhm <b>\n<parameter=n>2</parameter></function> oops</tool_call>.", ".",
     [("add", '{"n": 2}')]),
    ("minimax_m2", "<minimax:tool_call><invoke name='add'></invoke><invoke name=\"add\"><parameter name=\"n\">3"
     "</parameter></invoke></minimax:tool_call>", "", [("add", "{}"), ("add", '{"n": 3}')]),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="n">3</parameter></minimax:tool_call>.', ".",
     [("add", '{"n": 3}')]),
    # closing marks that are missing: the next argument, the next call or the end of the text ends the value
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK\n<parameter=n>\n3\n</parameter>\n</function>\n"
     "</tool_call>!", "!", [("add", '{"city": "K", "n": 3}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=n>\n3\n<parameter=city>\n<parameter=level>\nlow", "",
     [("add", '{"n": 3, "city": "", "level": "low"}')]),
    ("qwen3_coder", "<function=add>\n<parameter=city>K<parameter=n>3</parameter></function>", "",
     [("add", '{"city": "K", "n": 3}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK\n</function>", "", [("add", '{"city": "K"}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK\n</tool_call>\n", "", [("add", '{"city": "K"}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK\n</function>\n<function=add>\n</function>\n"
     "</tool_call>", "", [("add", '{"city": "K"}'), ("add", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=n>\n3\n</function>\n<tool_call>\n<function=add>", "",
     [("add", '{"n": 3}'), ("add", "{}")]),
    # a value that speaks of the marks
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=city>\nK </function> <parameter=x> </tool_call>;\n"
     "</function>;\n</parameter>\n</function>\n</tool_call>", "",
     [("add", '{"city": "K </function> <parameter=x> </tool_call>;\\n</function>;"}')]),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="city">K\n<parameter name="n">3</invoke>\n'
     '<invoke name="add"></invoke></minimax:tool_call>', "", [("add", '{"city": "K", "n": 3}'), ("add", "{}")]),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="city">K\n</invoke>', "",
     [("add", '{"city": "K"}')]),
    ("glm45", "<tool_call>add\n<arg_key>city</arg_key>\n<arg_value>K\n<arg_key>n</arg_key>\n<arg_value>3", "",
     [("add", '{"city": "K", "n": 3}')]),
    ("minimax_m2", "<minimax:tool_ca", "<minimax:tool_ca", []),
    ("minimax_m2", f"<minimax:tool_call><invoke name={'x' * 300}>", f"<minimax:tool_call><invoke name={'x' * 300}>",
     []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), BROKEN)
def test_what_was_not_taught(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Oracle: by hand; no text is lost, and the known part stays JSON."""
    found = every_split(name, text)
    assert (found.content, found.calls) == (content.lstrip() if calls else content, calls)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_split_of_any_text(name: str, data: st.DataObject) -> None:
    """Oracle: the text in one piece."""
    fragments = [*TOOL_FORMATS[name].marks, ">", "\n", "add", "city", "n", " ", "1", '"', call(name, "add", {"n": "1"})]
    parts: Sequence[str] = data.draw(st.lists(st.sampled_from(fragments), max_size=10))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut_off in (False, True):
        whole = find(parser(name), [text], cut_off)
        assert find(parser(name), pieces, cut_off) == whole
        assert cut_off or all(json.loads(arguments) is not None for _, arguments in whole.calls)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_by_a_limit(name: str) -> None:
    """Oracle: a beginning of the whole answer, and no marks."""
    text = f"I look. {call(name, 'add', {'city': 'Köln', 'deep': '{}'})}"
    [(_, whole)] = find(parser(name), [text]).calls
    for end in range(len(text)):
        found = find(parser(name), [text[:end]], cut_off=True)
        assert "I look. ".startswith(found.content)
        assert all(whole.startswith(arguments) for _, arguments in found.calls)


@pytest.mark.parametrize("name", NAMES)
def test_text_comes_before_its_argument_ends(name: str) -> None:
    """Oracle: a stream's client sees the name and the text while the model still writes."""
    text = call(name, "add", {"city": "a long text"})
    events = parser(name).feed(text[: text.index(" text")])
    assert isinstance(events[0], CallStarted) and events[1] == CallArguments(0, '{"city": "a long')


def test_types_of_a_schema_that_says_little() -> None:
    """Oracle: by hand; a circular reference ends."""
    types = ArgumentTypes({"properties": {"a": {"$ref": "#/properties/a"}, "b": {}, "c": True, "d": {"type": "str"}}})
    assert [types.of(key) for key in "abc"] == [None] * 3 and types.of("d") == frozenset({"string"})
    assert ArgumentTypes({"properties": 5}).of("a") is None
    deep = "[" * 100_000
    assert json.loads(json_value(deep, frozenset({"array"}))) == deep
