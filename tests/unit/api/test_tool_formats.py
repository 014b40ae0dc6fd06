"""Formats of tool calls that only name their marks: what each finds, for every split of the text."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.unit.api.test_reasoning import follows
from tests.unit.api.test_tool_parsers import ARGUMENTS, find
from tp_engine.api.openai.chat.options import TOOL_FORMATS
from tp_engine.api.openai.chat.parser import ChatParsing
from tp_engine.api.openai.structured import TokenWriting
from tp_engine.api.openai.tools.events import ToolParser
from tp_engine.api.openai.tools.forced import forced_calls
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.structured_outputs import StructuredOutputsParams

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = ToolRequest(
    tools=tuple({"function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "größe", "a.b-c")),
    choice="auto",
)
Calls = list[tuple[str, object]]
VALUE = json.loads(ARGUMENTS)
ADD: Calls = [("add", VALUE)]
BOTH: Calls = [("add", VALUE), ("größe", {})]

DS_OPEN, DS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_END, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def v3(name: str, arguments: str) -> str:
    return f"{DS_CALL}function{DS_SEP}{name}\n```json\n{arguments}\n```{DS_END}"


def v31(name: str, arguments: str) -> str:
    return f"{DS_CALL}{name}{DS_SEP}{arguments}{DS_END}"


def kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def dsml(name: str, *pairs: tuple[str, str, str]) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}"{text and f" string={chr(34)}{text}{chr(34)}"}>{value}</｜DSML｜parameter>\n'
        for key, text, value in pairs
    )
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


K_OPEN, K_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
V_OPEN, V_CLOSE = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
SEED = "<function=add>\n<parameter=city>\nKöln </think>\n</parameter>\n<parameter=n>5</parameter>\n</function>\n"
COHERE = f'{{"tool_call_id": "0", "tool_name": "add", "parameters": {ARGUMENTS}}}'
LISTED = f'{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "größe", "arguments": {{}}}}]'
PYTHON = """add(city='Kö"ln\\n', n=-1, d={'k': None, "l": [True, 2.5, (1,)]}, e="a]b)c'"), größe()"""
PYTHON_CALLS: Calls = [
    ("add", {"city": 'Kö"ln\n', "n": -1, "d": {"k": None, "l": [True, 2.5, [1]]}, "e": "a]b)c'"}),
    ("größe", {}),
]
G = '<|"|>'

# the format -> text, content, calls
CASES: list[tuple[str, str, str, Calls]] = [
    ("deepseek_v3", f"Ich sehe.\n{DS_OPEN}{v3('add', ARGUMENTS)}\n{v3('größe', '{}')}{DS_CLOSE}", "Ich sehe.", BOTH),
    ("deepseek_v3", f"{DS_OPEN}{v31('add', ARGUMENTS)}{DS_CLOSE}", "", ADD),
    ("deepseek_v3", f"{DS_OPEN}{v3('add', json.dumps(VALUE, indent=2))}{DS_CLOSE} Done.", "Done.", ADD),
    ("deepseek_v3", f"{DS_OPEN}{v3('add', '{}')}", "", [("add", {})]),
    ("deepseek_v31", f"A {DS_OPEN}{v31('add', ARGUMENTS)}{v31('größe', '{}')}{DS_CLOSE}", "A", BOTH),
    ("deepseek_v31", f"{DS_OPEN}{v3('add', ARGUMENTS)}{DS_CLOSE}", "", ADD),
    ("deepseek_v31", f"{DS_OPEN}{v31('function', '{}')}{DS_CLOSE}", "", [("function", {})]),
    ("deepseek_v31", f"{DS_OPEN}no call{DS_CLOSE}", f"{DS_OPEN}no call{DS_CLOSE}", []),
    ("deepseek_v31", "plain <｜tool", "plain <｜tool", []),
    ("deepseek_v32", f"A\n\n{V_OPEN}{dsml('add', ('city', 'true', '5 </x> '), ('n', 'false', '7'))}"
     f"{dsml('größe')}{V_CLOSE}", "A", [("add", {"city": "5 </x> ", "n": 7}), ("größe", {})]),
    ("deepseek_v32", f"{V_OPEN}{dsml('add', ('x', 'true', '5'), ('y', 'false', '[1]'), ('z', '', 'no'))}{V_CLOSE}", "",
     [("add", {"x": "5", "y": [1], "z": "no"})]),
    ("deepseek_v32", f"{V_OPEN}{dsml('add', ('city', 'false', '5'))}{V_CLOSE}", "", [("add", {"city": "5"})]),
    ("deepseek_v32", dsml("add", ("n", "false", "5")), "", [("add", {"n": 5})]),
    ("deepseek_v32", f'{V_OPEN}<｜DSML｜invoke name="größe"/>\n{dsml("add")}', "", [("größe", {}), ("add", {})]),
    ("kimi_k2", f"I add.{K_OPEN}{kimi('functions.add', 0, ARGUMENTS)}{kimi('functions.größe', 1, '{}')}{K_CLOSE}",
     "I add.", BOTH),
    ("kimi_k2", f"{K_OPEN} {kimi('add', 3, ARGUMENTS)}\n{K_CLOSE} Done.", "Done.", ADD),
    ("kimi_k2", f"{K_OPEN}{kimi('functions.a.b-c', 12, '{}')}{K_CLOSE}", "", [("a.b-c", {})]),
    ("kimi_k2", kimi("functions.add", 0, ARGUMENTS), "", ADD),
    ("kimi_k2", f"{K_OPEN}<|tool_call_begin|>functions.add:0<|tool_call_begin|>functions.größe:1"
     f"<|tool_call_argument_begin|>{{}}<|tool_call_end|>{K_CLOSE}", "<|tool_call_begin|>functions.add:0",
     [("größe", {})]),
    ("seed_oss", f"Hm. <seed:tool_call>\n{SEED}</seed:tool_call>", "Hm.", [("add", {"city": "Köln </think>", "n": 5})]),
    ("seed_oss", f"<seed:tool_call>{SEED}</seed:tool_call><seed:tool_call><function=größe></function></seed:tool_call>",
     "", [("add", {"city": "Köln </think>", "n": 5}), ("größe", {})]),
    ("cohere_command3", f"<|START_ACTION|>[\n    {COHERE},\n    {COHERE}\n]<|END_ACTION|>", "", ADD * 2),
    ("cohere_command3", "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>", "It is 4.", []),
    ("phi4_mini_json", f"functools[{LISTED}", "", BOTH),
    ("phi4_mini_json", f"I add. <|tool_call|>[{LISTED}<|/tool_call|> Done.", "I add.  Done.", BOTH),
    ("phi4_mini_json", f"functools[{LISTED.replace('arguments', 'parameters')}", "", BOTH),
    ("phi4_mini_json", "functools[0] is a module", "functools[0] is a module", []),
    ("pythonic", f"[{PYTHON}]", "", PYTHON_CALLS),
    ("pythonic", f"\n<|python_start|>[{PYTHON}]<|python_end|>", "", PYTHON_CALLS),
    ("pythonic", "[a.b-c(n=007, s=f'x', t={1, 2}, u='a' 'b', from='x')]", "",
     [("a.b-c", {"n": 7, "s": "x", "t": [1, 2], "u": "ab", "from": "x"})]),
    ("pythonic", "[add('Köln', 3)]", "", [("add", {"city": "Köln", "n": 3})]),
    ("pythonic", "[add(city=print(1))]", "[add(city=print(1))]", []),
    ("pythonic", "[add](https://x.y) is a link (yes)", "[add](https://x.y) is a link (yes)", []),
    ("pythonic", "[unheard_of(a=1)] ", "[unheard_of(a=1)] ", []),
    ("pythonic", "I call [add(n=1)]", "I call [add(n=1)]", []),
    ("pythonic", "[add(n=1)", "", [("add", {"n": 1})]),
    ("pythonic", "[add(city='x", "[add(city='x", []),
    ("pythonic", " [1, 2] ", " [1, 2] ", []),
    ("olmo3", f"I add.\n<function_calls>{PYTHON.replace(', größe', chr(10) + 'größe')}</function_calls>", "I add.",
     PYTHON_CALLS),
    ("olmo3", "<function_calls>add(n=null, city=true)\n</function_calls>!", "!", [("add", {"n": None, "city": True})]),
    ("olmo3", "<function_calls>add(n=f(1))</function_calls>", "", [("add", "n=f(1)")]),
    ("olmo3", "<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
    ("lfm2", f"Let me.<|tool_call_start|>[{PYTHON}]<|tool_call_end|>Done.", "Let me.Done.", PYTHON_CALLS),
    ("lfm2", "<|tool_call_start|>[add(city='two\nlines\t')]<|tool_call_end|><|tool_call_end|>", "",
     [("add", {"city": "two\nlines\t"})]),
    ("lfm2", "<|tool_call_start|>[add(city='x", "", [("add", {"city": "x"})]),
    ("gemma4", f"I add. <|tool_call>"
     f"call:add{{city:{G}K}}ö'ln <tool_call|>{G},n:42,o:{{x:[1,{G}a{G}],b:true}}}}<tool_call|>"
     "<|tool_call>call:größe{}<tool_call|>", "I add.",
     [("add", {"city": "K}ö'ln <tool_call|>", "n": 42, "o": {"x": [1, "a"], "b": True}}), ("größe", {})]),
    ("gemma4", f"<|tool_call>:add{{n:3}}<tool_call|><|tool_call>call:a.b-c({G}n{G}:null)<tool_call|> Done.", "Done.",
     [("add", {"n": 3}), ("a.b-c", {"n": None})]),
    ("gemma4", f"<|tool_call>call:add{{city:{G}London", "", [("add", {"city": "London"})]),
    ("gemma4", "<|tool_call>call:add{city:New York,n:5,x:[a b,{y:z}]}<tool_call|>", "",
     [("add", {"city": "New York", "n": 5, "x": ["a b", {"y": "z"}]})]),
    ("gemma4", "<|tool_call>call:add <|tool_call>call:größe{}<tool_call|>", "<|tool_call>call:add", [("größe", {})]),
    ("gemma4", "It is 4.<channel|>", "It is 4.", []),
]  # fmt: skip


def parser(name: str) -> ToolParser:
    return TOOL_FORMATS[name].new_parser(TOOLS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_every_split(name: str, text: str, content: str, calls: Calls) -> None:
    """Whole, in two and three pieces, and character by character. Oracle: by hand."""
    whole = find(parser(name), [text])
    found = [(function, json.loads(arguments)) for function, arguments in whole.calls]
    assert (whole.content, found) == (content, calls)
    assert find(parser(name), text) == whole
    places = range(len(text) + 1)
    for first in places:
        assert find(parser(name), [text[:first], text[first:]]) == whole, text[:first]
    pairs = [(one, other) for one in places for other in places if one < other]
    for first, second in random.Random(3).sample(pairs, min(len(pairs), 80)):
        assert find(parser(name), [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize(("name", "text", "content", "calls"), [case for case in CASES if case[3]])
def test_cut_off_by_a_limit(name: str, text: str, content: str, calls: Calls) -> None:
    """Oracle: for any cut of the end, a beginning of the whole answer; no markup; streamed equals whole."""
    whole = find(parser(name), [text]).calls
    for end in range(len(text)):
        found = find(parser(name), [text[:end]], cut_off=True)
        assert find(parser(name), text[:end], cut_off=True) == found
        assert content.startswith(found.content.rstrip())
        assert len(found.calls) <= len(whole)
        for (function, part), (expected, arguments) in zip(found.calls, whole, strict=False):
            assert function == expected and arguments.startswith(part)


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_random_splits_of_random_texts(name: str) -> None:
    """Oracle: the text in one piece; arguments are JSON unless a limit cut them off."""
    rng = random.Random(5)
    fragments = [*(case[1] for case in CASES if case[0] == name), *TOOL_FORMATS[name].marks, "\n", "{", "[", "(", "'",
                 ")", "]", "}", "add", ":", "=", "\\", '"', "<", "n", " 1"]  # fmt: skip
    for _ in range(100):
        text = "".join(rng.choices(fragments, k=rng.randint(1, 8)))
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, 9)
            pieces.append(rest[:size])
            rest = rest[size:]
        for cut_off in (False, True):
            assert find(parser(name), pieces, cut_off) == find(parser(name), [text], cut_off), text


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3", "gemma4"])
def test_long_literals_take_linear_time(name: str) -> None:
    """Oracle: no text is lost, well within the test's limit, whatever a model repeats."""
    opens = TOOL_FORMATS[name].opens[0]
    for unit in ("(", "[{", "'\\", '"', "a=", "a=[1,", "{1,", "\\\\", '<|"|>', "{a:"):
        text = f"{opens}add({unit * 5_000}"
        found = find(parser(name), [text[i : i + 4096] for i in range(0, len(text), 4096)])
        assert found.content or found.calls


FORCED = {name: calls.forced for name, calls in TOOL_FORMATS.items() if calls.forced is not None}


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_in_the_models_own_form(name: str) -> None:
    """Oracle: the grammar takes what the form says, by hand, and nothing else; the format's parser reads the calls."""
    form = FORCED[name]
    tools = ToolRequest(tools=TOOLS.tools, choice="required")

    def call(function: str, arguments: str) -> str:
        return form.call.replace("NAME", function).replace("NUMBER", "0").replace("ARGUMENTS", arguments)

    def text(*calls: str) -> str:
        return form.begin + form.between.join(calls) + form.end

    one, other = call("add", '{"city": "Köln", "n": 5}'), call("größe", "{}")
    named = replace(tools, choice="named", name="add")
    single = replace(tools, several=False)
    for asked, written, fits in (
        (tools, text(one), True),
        (tools, text(one, other, one), True),
        (tools, text(), False),
        (tools, one, False),
        (tools, text(call("unheard_of", "{}")), False),
        (tools, text(call("add", '{"n": "x"}')), False),
        (single, text(one), True),
        (single, text(one, other), False),
        (named, text(one), True),
        (named, text(other), False),
    ):
        grammar = forced_calls(
            form, TOOL_FORMATS[name].marks, asked, TokenWriting(None), StructuredOutputsParams(json={})
        )
        assert follows(StructuredOutputsParams(grammar=grammar), written) is fits, (asked.choice, written)
    how = ChatParsing(tools=tools, tool_format=TOOL_FORMATS[name])
    found = how.parse(text(one, other), (), "stop")
    assert [(function, json.loads(arguments)) for _, function, arguments in found.calls] == [
        ("add", {"city": "Köln", "n": 5}),
        ("größe", {}),
    ]
    assert found.content == "" and found.finish_reason == "tool_calls"
