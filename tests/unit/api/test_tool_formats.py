"""Formats of tool calls that only name their marks: what each finds, for every split of the text."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import replace

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_reasoning import follows
from tests.unit.api.test_tool_parsers import ARGUMENTS, find
from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.tools.events import CallArguments
from tp_engine.api.openai.tools.forced import forced_calls
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.text_parser import TextParser
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.api.openai.tools.tool_format import ForcedForm
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import make_vocabulary
from tp_engine.requests.structured_outputs import StructuredOutputsParams

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


def v4(text: str) -> str:
    return text.replace("function_calls", "tool_calls")


def hy3(name: str, *pairs: tuple[str, str], version: str = ":opensource") -> str:
    values = "".join(f"<arg_key@>{key}</arg_key@>\n<arg_value@>{value}</arg_value@>\n" for key, value in pairs)
    return f"<tool_call@>{name}<tool_sep@>\n{values}</tool_call@>\n".replace("@", version)


def hy3_block(*calls: str, version: str = ":opensource") -> str:
    return f"<tool_calls{version}>\n{''.join(calls)}</tool_calls{version}>"


def solar(name: str, arguments: str, call_id: str = "a1b2c3d4e5") -> str:
    return f"<|tool_call:begin|>{call_id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"


def minicpm(name: str, *pairs: tuple[str, str]) -> str:
    values = "".join(f'<param name="{key}">{value}</param>' for key, value in pairs)
    return f'<function name="{name}">{values}</function>'


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
    ("deepseek_v32", f'{V_OPEN}<｜DSML｜invoke name="add">\n{ARGUMENTS}\n</｜DSML｜invoke>\n{V_CLOSE}', "", ADD),
    ("deepseek_v32", f'{V_OPEN}<｜DSML｜invoke name="add">\n{{"n": 5}}', "", [("add", {"n": 5})]),
    ("deepseek_v32", f'{V_OPEN}<｜DSML｜invoke name="add">{{no}}</｜DSML｜invoke>{V_CLOSE}', "", [("add", {})]),
    ("deepseek_v32", f"A <｜DSML｜tool_calls>\n{dsml('add', ('n', 'false', '5'))}</｜DSML｜tool_calls>", "A",
     [("add", {"n": 5})]),
    ("deepseek_v32", V_OPEN + dsml("add", ("n", "false", "5")).replace("\n", '\n{"city": "x"}', 1) + V_CLOSE, "",
     [("add", {"city": "x"})]),
    ("seed_oss", '<seed:tool_call><function=add>{"n": 5}</function></seed:tool_call>', "", [("add", {"n": 5})]),
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
    ("olmo3", "<function_calls>add(n=f(1))</function_calls>", "", [("add", {"n": "f(1)"})]),
    ("olmo3", "<function_calls>add(city='a' + b, n=[1, x], 7)\nadd('a' 'b', 2, 3)</function_calls>", "",
     [("add", {"city": "a + b", "n": "[1, x]", "3": 7}), ("add", {"city": "ab", "n": 2, "3": 3})]),
    ("lfm2", r"<|tool_call_start|>[add(city = 'a\ud83d\ude00\x41\'' , n=5,)]<|tool_call_end|>", "",
     [("add", {"city": "a😀A'", "n": 5})]),
    ("lfm2", '<|tool_call_start|>[add(city="""a"b\'\n""", e="", f=\'\')]<|tool_call_end|>', "",
     [("add", {"city": 'a"b\'\n', "e": "", "f": ""})]),
    ("pythonic", "[add(n=1, city=print(1)), add(city='x", ", add(city='x", [("add", {"n": 1, "city": "print(1)"})]),
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
    # What models do, as other engines' tests have it: a wrapper around all arguments, quotes without a backslash, a
    # block that comes twice, and text between the marks of a block.
    ("deepseek_v32", f"{V_OPEN}{dsml('add', ('arguments', 'false', ARGUMENTS))}{V_CLOSE}", "", ADD),
    ("deepseek_v32", f"{V_OPEN}{dsml('add', ('input', 'true', ARGUMENTS))}{V_CLOSE}", "", ADD),
    ("deepseek_v32", f"{V_OPEN}{dsml('add', ('input', 'false', '{}'), ('n', 'false', '5'))}{V_CLOSE}", "",
     [("add", {"input": {}, "n": 5})]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=input>\nKöln\n</parameter>\n</function>\n</tool_call>", "",
     [("add", {"input": "Köln"})]),
    ("glm45", "Use <tool_call>:\n<tool_call>add</tool_call>", "Use <tool_call>:", [("add", {})]),
    ("lfm2", "<|tool_call_start|>[add(city='sed -n '1,5p' /t, u', n=1)]<|tool_call_end|>", "",
     [("add", {"city": "sed -n '1,5p' /t, u", "n": 1})]),
    ("lfm2", "<|tool_call_start|>[add(city='sh -c \"f('\\,', ')')\"')]<|tool_call_end|>", "",
     [("add", {"city": "sh -c \"f('\\,', ')')\""})]),
    ("lfm2", "<|tool_call_start|>[add(city='Köln')", "", [("add", {"city": "Köln"})]),
    ("lfm2", "<|tool_call_start|>[add(n=1)]<|tool_call_end|>[add(n=1)]<|tool_call_end|> Done.", "Done.",
     [("add", {"n": 1})]),
    ("lfm2", "<|tool_call_start|>[add(n=1)]<|tool_call_end|>[add(n=1)] is done", "[add(n=1)] is done",
     [("add", {"n": 1})]),
    ("lfm2", "<|tool_call_start|>[add(n=1)]<|tool_call_end|>[1] is done", "[1] is done", [("add", {"n": 1})]),
    ("deepseek_v3", f"{DS_OPEN} noise {v3('add', ARGUMENTS)}{DS_CLOSE}", f"{DS_OPEN} noise", ADD),
    ("deepseek_v4", v4(f"A\n\n{V_OPEN}{dsml('add', ('city', 'true', '5 </x> '), ('n', 'false', '7'))}{dsml('größe')}"
     f"{V_CLOSE}"), "A", [("add", {"city": "5 </x> ", "n": 7}), ("größe", {})]),
    ("deepseek_v4", f"{V_OPEN}{dsml('add', ('n', 'false', '5'))}{V_CLOSE}", "", [("add", {"n": 5})]),
    ("hy_v3", f"A {hy3_block(hy3('add', ('city', 'Köln </x> '), ('n', '7')), hy3('größe'))}", "A",
     [("add", {"city": "Köln </x> ", "n": 7}), ("größe", {})]),
    ("hy_v3", hy3_block(hy3("add", ("n", "7"), version=""), hy3("größe", version=""), version=""), "",
     [("add", {"n": 7}), ("größe", {})]),
    ("hy_v3", f"{hy3('add', ('o', '[1, {}]'))}{hy3('größe')} Done.", "Done.", [("add", {"o": [1, {}]}), ("größe", {})]),
    ("hy_v3", hy3_block(f"<tool_call:opensource>add<tool_sep:opensource>{ARGUMENTS}</tool_call:opensource>\n"), "",
     ADD),
    ("hy_v3", hy3_block("<tool_call:opensource>größe</tool_call:opensource>"), "", [("größe", {})]),
    ("hy_v3", hy3_block(hy3("add", ("n", "7")).replace("<tool_sep:opensource>", "")), "", [("add", {"n": 7})]),
    ("hy_v3", "a <tool_call> and <tool_calls:opensource> no", "a <tool_call> and <tool_calls:opensource> no", []),
    ("solar_open", f"<|content|>A.<|end|><|begin|>assistant<|tool_calls|>{solar('add', ARGUMENTS)}"
     f"{solar('größe', '{}')}<|calls|>", "A.", BOTH),
    ("solar_open", f"<|begin|>assistant<|tool_calls|>{solar('add', json.dumps(VALUE, indent=2), '')}", "", ADD),
    ("solar_open", f"{solar('a.b-c', '{}')}<|calls|> Done.<|end|>", "Done.", [("a.b-c", {})]),
    ("solar_open", "<|tool_calls|>no call", "<|tool_calls|>no call", []),
    ("minicpm5", f"A\n{minicpm('add', ('city', 'Köln'), ('n', '7'))}\n{minicpm('größe')}", "A",
     [("add", {"city": "Köln", "n": 7}), ("größe", {})]),
    ("minicpm5", minicpm("add", ("city", "<![CDATA[a </param> & <b>\n]]]]>"), ("o", "{'k': True}")), "",
     [("add", {"city": "a </param> & <b>\n]]", "o": "{'k': True}"})]),
    ("minicpm5", f"<tool_call>\n{minicpm('add', ('n', '<![CDATA[7]]>'))}\n</tool_call>", "", [("add", {"n": 7})]),
    ("minicpm5", minicpm("add", ("arguments", ARGUMENTS)), "", ADD),
    ("minicpm5", "<function name='add'>{\"n\": 5}</function>", "", [("add", {"n": 5})]),
    ("minicpm5", '<function name="add"><param name="city"><![CDATA[Köln]]>', "", [("add", {"city": "Köln"})]),
    ("minicpm5", '<function name="add"><param name="city"><![CDATA[Köln]]></function>', "",
     [("add", {"city": "Köln"})]),
    ("minicpm5", f"Write {minicpm('unheard_of', ('a', '1'))}!", f"Write {minicpm('unheard_of', ('a', '1'))}!", []),
    ("nemotron_v2", f"A.\n\n<TOOLCALL>[{LISTED}</TOOLCALL>", "A.", BOTH),
    ("nemotron_v2", f'<TOOLCALL>[{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}]</TOOLCALL> Done.', "Done.",
     ADD),
    ("nemotron_v2", "<TOOLCALL>none</TOOLCALL>", "<TOOLCALL>none</TOOLCALL>", []),
]  # fmt: skip


def parser(name: str) -> TextParser:
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|>[add(n=5, city='{}')]<|tool_call_end|>"),
        ("olmo3", '<function_calls>add(n=5, city="{}")</function_calls>'),
        ("pythonic", "[add(n=5, city='{}')]"),
        ("gemma4", f"<|tool_call>call:add{{n:5,city:{G}{{}}{G}}}<tool_call|>".replace("{{}}", "{}")),
    ],
)
def test_strings_are_passed_on_as_they_come(name: str, text: str) -> None:
    """Oracle: the text that has come, but for the last characters, which may begin an escape or a mark."""
    before, _, after = text.partition("{}")
    tools, said = parser(name), ""
    events = tools.feed(before)
    for number in range(200):
        word = f"word {number}; "
        said += word
        events += tools.feed(word)
        sent = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert sent.startswith('{"n": 5, "city": "') and len(sent) > len('{"n": 5, "city": "') + len(said) - 20
    events += tools.feed(after) + tools.finish(cut_off=False)
    sent = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert json.loads(sent) == {"n": 5, "city": said}


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3", "gemma4"])
def test_long_literals_take_linear_time(name: str) -> None:
    """Oracle: no text is lost, well within the test's limit, whatever a model repeats."""
    opens = TOOL_FORMATS[name].opens[0]
    for unit in ("(", "[{", "'\\", '"', "a=", "a=[1,", "{1,", "\\\\", '<|"|>', "{a:"):
        text = f"{opens}add({unit * 5_000}"
        found = find(parser(name), [text[i : i + 4096] for i in range(0, len(text), 4096)])
        assert found.content or found.calls


def test_white_space_where_a_call_may_begin_takes_linear_time() -> None:
    """Oracle: no text is lost, well within the test's limit."""
    pieces = ["[", *["    " * 4] * 30_000]
    assert find(parser("pythonic"), pieces).content == "".join(pieces)


# The formats that have a form of forced calls, with its versions; that of whole messages has a grammar of its own.
FORCED = [
    (name, version)
    for name, calls in TOOL_FORMATS.items()
    if calls.forced is not None
    for version in range(len(calls.forced.versions))
]
CITY = '{"city": "Köln", "n": 5}'
CITY_CALL, EMPTY_CALL = f'{{"name": "add", "arguments": {CITY}}}', '{"name": "größe", "arguments": {}}'
JSON_FORM = ('{"city": "Köln", "n": 5}', "{}", '{"n": "x"}')
MARKED = "<parameter=city>\nKöln\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
DSML_CITY = '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
DSML_N = '<｜DSML｜parameter name="n" string="false">{}</｜DSML｜parameter>\n'
GLM = "<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>n</arg_key>\n<arg_value>{}</arg_value>\n"
HY3 = GLM.replace(">", "@>").replace("@", ":opensource")
MINICPM = '<param name="city">Köln</param><param name="n">{}</param>'
MINIMAX = '<parameter name="city">Köln</parameter>\n<parameter name="n">{}</parameter>\n'
# the format, or one of its other versions -> arguments of a city and a number, none, and arguments that break the
# schema; by hand
ARGUMENT_FORMS = {
    "seed_oss": (MARKED, "", MARKED.replace("5", "x")),
    "qwen3_coder": (MARKED, "", MARKED.replace("5", "x")),
    "minimax_m2": (MINIMAX.format(5), "", MINIMAX.format("x")),
    "glm45": (GLM.format(5), "", GLM.format("x")),
    "glm45 1": (GLM.format(5).replace("\n", ""), "", GLM.format("x").replace("\n", "")),
    "deepseek_v32": (DSML_CITY + DSML_N.format(5), "", DSML_N.format("x")),
    "deepseek_v4": (DSML_CITY + DSML_N.format(5), "", DSML_N.format("x")),
    "hy_v3": (HY3.format(5), "", HY3.format("x")),
    "hy_v3 1": (GLM.format(5), "", GLM.format("x")),
    "minicpm5": (MINICPM.format(5), "", MINICPM.format("x")),
    "gemma4": (f"city:{G}Köln{G},n:5", "", "n:x"),
    **dict.fromkeys(("pythonic", "olmo3", "lfm2"), ('city="Köln", n=5', "", 'n="x"')),
}


def version_of(name: str, version: int) -> tuple[ForcedForm, tuple[str, str, str]]:
    """The form of forced calls, and arguments as in ``ARGUMENT_FORMS``."""
    forced = TOOL_FORMATS[name].forced
    assert forced is not None
    key = f"{name} {version}" if version else name
    return forced.versions[version], ARGUMENT_FORMS.get(key, JSON_FORM)


def written_call(form: ForcedForm, function: str, arguments: str) -> str:
    words = {
        "NUMBER": "0",
        "IDENTIFIER": "a1B2c3D4e",
        "TENCHARS": "a1b2c3d4e5",
        "NAME": function,
        "ARGUMENTS": arguments,
    }
    return re.sub("|".join(words), lambda found: words[found[0]], form.call)


def test_every_format_forces_its_own_form() -> None:
    """Oracle: the table of formats: each names a form of its calls, or is of whole messages, which have a grammar."""
    assert {name for name, calls in TOOL_FORMATS.items() if (calls.forced is None) == (calls.message is None)} == set()


# By hand, of each version of the models: a call of add(city="Köln", n=5), and that with a call of größe() behind it.
OWN_FORMS = [
    ("hermes", f"<tool_call>\n{CITY_CALL}\n</tool_call>", f"\n<tool_call>\n{EMPTY_CALL}\n</tool_call>"),
    ("hermes", f"<tool_call>{CITY_CALL}</tool_call>", f"\n<tool_call>{EMPTY_CALL}</tool_call>"),
    ("ernie45", f"<tool_call>\n{CITY_CALL}\n</tool_call>", f"\n<tool_call>\n{EMPTY_CALL}\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{CITY}", "[TOOL_CALLS]größe[ARGS]{}"),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{CITY}", "[TOOL_CALLS]größe[CALL_ID]000000000[ARGS]{}"),
    ("mistral", f"[TOOL_CALLS][{CITY_CALL}]", f", {EMPTY_CALL}]"),
    ("mistral", f"[TOOL_CALLS] [{CITY_CALL}]", f", {EMPTY_CALL}]"),
    ("llama3_json", CITY_CALL.replace("arguments", "parameters"), f"; {EMPTY_CALL.replace('arguments', 'parameters')}"),
    ("glm45", f"<tool_call>add\n{GLM.format(5)}</tool_call>", "\n<tool_call>größe\n</tool_call>"),
    ("glm45", f"<tool_call>add{GLM.format(5)}</tool_call>".replace("\n", ""), "<tool_call>größe</tool_call>"),
    ("minicpm5", MINICPM.join(('<function name="add">', "</function>")).format(5), "\n" + minicpm("größe")),
    ("solar_open", f"<|tool_calls|>{solar('add', CITY)}", solar("größe", "{}", "0000000000")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "more"), OWN_FORMS)
def test_the_forms_of_other_versions(name: str, one: str, more: str) -> None:
    """Oracle: texts by hand; JSON without marks, and a text in front of the call, are refused."""
    tools = ToolRequest(tools=TOOLS.tools, choice="required")
    both = one.removesuffix("]") + more
    for asked, text, fits in (
        (tools, one, True),
        (tools, both, True),
        (replace(tools, choice="named", name="add"), one, True),
        (replace(tools, several=False), both, False),
        (tools, f'[{{"name": "add", "parameters": {CITY}}}]', False),
        (replace(tools, choice="named", name="add"), CITY, False),
        (tools, f"I add. {one}", False),
    ):
        assert forced_output(name, asked, text) is fits, (asked.choice, text)


def test_a_function_may_be_called_as_a_word_of_the_forms() -> None:
    """Oracle: by hand: names are names, also those that forms use for their own places."""
    for word in ("NUMBER", "NAME", "ARGUMENTS", "IDENTIFIER", "MY_NUMBER"):
        tools = forcing({"type": "object"}, word)
        assert forced_output("hermes", tools, f'<tool_call>\n{{"name": "{word}", "arguments": {{}}}}\n</tool_call>')
        assert not forced_output("hermes", tools, '<tool_call>\n{"name": "12", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(("name", "version"), FORCED)
def test_forced_calls_are_in_the_models_own_form(name: str, version: int) -> None:
    """Oracle: the grammar takes what the form says, by hand, and nothing else; the format's parser reads the calls."""
    form, (full, empty, wrong) = version_of(name, version)
    tools = ToolRequest(tools=TOOLS.tools, choice="required")

    def call(function: str, arguments: str) -> str:
        return written_call(form, function, arguments)

    def text(*calls: str) -> str:
        return form.begin + form.between.join(calls) + form.end

    one, other = call("add", full), call("größe", empty)
    named = replace(tools, choice="named", name="add")
    single = replace(tools, several=False)
    for asked, written, fits in (
        (tools, text(one), True),
        (tools, text(one, other, one), True),
        (tools, text(), False),
        (tools, one, not form.begin + form.end),
        (tools, text(call("unheard_of", empty)), False),
        (tools, text(call("add", wrong)), False),
        (single, text(one), True),
        (single, text(one, other), False),
        (named, text(one), True),
        (named, text(other), False),
    ):
        assert forced_output(name, asked, written) is fits, (asked.choice, written)
    how = ChatParsing(tools=tools, tool_format=TOOL_FORMATS[name], forced="a grammar")
    for size in (1, 3, 10_000):
        found = ParsedMessage()
        parser = how.new_parser()
        for start in range(0, len(text(one, other)), size):
            found.add(parser.feed(text(one, other)[start : start + size]))
        found.add(parser.finish("stop"))
        assert [(function, json.loads(arguments)) for _, function, arguments in found.calls] == [
            ("add", {"city": "Köln", "n": 5}),
            ("größe", {}),
        ]
        assert found.content == "" and parser.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("name", sorted(dict(FORCED)))
def test_calls_of_a_conversation_are_written_as_the_model_writes_them(name: str) -> None:
    """Oracle: the format's parser reads the same calls."""
    values: Calls = [("add", {"city": 'Kö"ln', "n": -1, "ok": True, "o": {"k": [None, "a, b"]}}), ("größe", {})]
    found = find(parser(name), [TOOL_FORMATS[name].written(values)])  # type: ignore[arg-type]
    assert [(function, json.loads(arguments)) for function, arguments in found.calls] == values
    assert found.content == ""


@pytest.mark.parametrize("is_special", ["all", "some"])
@pytest.mark.parametrize(("name", "version"), FORCED)
def test_forced_calls_with_marks_that_are_special_tokens(name: str, version: int, is_special: str) -> None:
    """Oracle: the tokens of a whole answer; no text has a mark, and none that is a token replaces one.

    ``some``: those that open and close a block, which most tokenizers have as tokens.
    """
    calls, (form, (full, empty, _)) = TOOL_FORMATS[name], version_of(name, version)
    assert calls.forced is not None
    written = [written_call(form, function, arguments) for function, arguments in (("add", full), ("größe", empty))]
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    marks = calls.marks if is_special == "all" else calls.marks[:2]
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tools = ToolRequest(tools=TOOLS.tools, choice="required")
    grammar = forced_calls(
        calls.forced, calls.marks, tools, TokenWriting.of(tokenizer), StructuredOutputsParams(json={})
    )
    vocabulary = make_vocabulary(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [tokenizer.eos_token_id])
    matcher = compile_grammar(StructuredOutputsParams(grammar=grammar), vocabulary).start()
    text = form.begin + form.between.join(written) + form.end
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept(token_id), (tokenizer.decode([token_id]), text)
    assert matcher.is_over or matcher.accept(tokenizer.eos_token_id)


def forced_output(name: str, tools: ToolRequest, text: str) -> bool:
    """Whether ``text`` is a whole output of calls that are forced."""
    form = TOOL_FORMATS[name].forced_form(tools)
    assert form is not None
    grammar = forced_calls(
        form, TOOL_FORMATS[name].marks, tools, TokenWriting.of(None), StructuredOutputsParams(json={})
    )
    return follows(StructuredOutputsParams(grammar=grammar), text)


def forcing(schema: dict[str, object], name: str = "f") -> ToolRequest:
    return ToolRequest(tools=({"function": {"name": name, "parameters": schema}},), choice="named", name=name)


RICH = {
    "type": "object",
    "properties": {
        "color": {"$ref": "#/$defs/Color", "description": "one of two"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 1},
        "ok": {"type": "boolean"},
    },
    "required": ["color", "parts"],
    "additionalProperties": False,
    "$defs": {
        "Color": {"enum": ["red", "blue"], "type": "string"},
        "Part": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "t": {"type": "string"}},
            "required": ["n"],
        },
    },
}
RICH_VALUE = {"color": "red", "code": "ab", "note": None, "parts": [{"n": 1, "t": "x, y"}, {"n": -2}], "ok": True}
PART, P_END = "<parameter=", "\n</parameter>\n"
RICH_MARKED = (
    f"{PART}color>\nred{P_END}{PART}code>\nab{P_END}{PART}note>\nnull{P_END}"
    f'{PART}parts>\n[{{"n": 1, "t": "x, y"}}, {{"n": -2}}]{P_END}{PART}ok>\ntrue{P_END}'
)
RICH_GEMMA = f"color:{G}red{G},code:{G}ab{G},note:null,parts:[{{n:1,t:{G}x, y{G}}},{{n:-2}}],ok:true"
RICH_PYTHON = 'color="red", code="ab", note=None, parts=[{"n": 1, "t": "x, y"}, {"n": -2}], ok=True'


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        (
            "seed_oss",
            f"<seed:tool_call>\n<function=f>\n{RICH_MARKED}</function>\n</seed:tool_call>",
            [("red", "green"), ("\nab", "\na"), ("\nab", "\nabcd"), ("null", "x</parameter>y"), ("-2", "x"),
             ("true", "yes"), (f"{PART}color>\nred{P_END}", ""), (f"{PART}ok", f"{PART}no")],
        ),
        (
            "gemma4",
            f"<|tool_call>call:f{{{RICH_GEMMA}}}<tool_call|>",
            [("red", "green"), (f"{G}ab", f"{G}a"), ("-2", "x"), ("[{n:1", "[{"), ("true", "yes"), (",ok", ",no"),
             (f"color:{G}red{G},", ""), ("ok:true", "ok:true,"), (f"[{{n:1,t:{G}x, y{G}}},{{n:-2}}]", "[]")],
        ),
        (
            "pythonic",
            f"[f({RICH_PYTHON})]",
            [("red", "green"), ('"ab"', '"a"'), ("-2", "x"), ("True", "true"), (", ok", ", no"),
             ('color="red", ', ""), ("None", "null")],
        ),
    ],
)  # fmt: skip
def test_forced_arguments_follow_their_schema(name: str, text: str, changes: list[tuple[str, str]]) -> None:
    """Oracle: by hand: a text of every kind of value, which the parser reads to the value, and changes that break the
    schema; optional arguments may be missing."""
    tools = forcing(RICH)
    assert forced_output(name, tools, text)
    how = ChatParsing(tools=tools, tool_format=TOOL_FORMATS[name], forced="a grammar")
    _, _, arguments = how.parse(text, (), "stop").calls[0]
    assert json.loads(arguments) == RICH_VALUE
    for old, new in changes:
        assert old in text and not forced_output(name, tools, text.replace(old, new)), (old, new)
    for optional in ("ok", "note"):
        less = {key: value for key, value in RICH["properties"].items() if key != optional}  # type: ignore[attr-defined]
        assert not forced_output(name, forcing(RICH | {"properties": less}), text)


@pytest.mark.parametrize(
    ("schema", "fitting"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^x"}}}, "pythonic"),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "pythonic gemma4"),
        ({"properties": {"a b": {"type": "string"}}}, ""),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ""),
        ({"minProperties": 1}, ""),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, "gemma4"),
        ({"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}},
                                                                      "type": "object"}}}, "pythonic gemma4 seed_oss"),
        ({"properties": {"a": {"type": "array", "minItems": 2}}}, "pythonic seed_oss"),
        ({"properties": {"a": {}}}, "pythonic gemma4 seed_oss"),
        ({}, "pythonic gemma4 seed_oss"),
    ],
)  # fmt: skip
def test_a_schema_that_the_form_can_not_keep_is_followed_in_json(schema: dict[str, object], fitting: str) -> None:
    """Oracle: by hand, what each way of writing can express; then the answer is the function's arguments as JSON."""
    tools = forcing({"type": "object", **schema})
    for name in ("pythonic", "gemma4", "seed_oss"):
        assert (TOOL_FORMATS[name].forced_form(tools) is not None) is (name in fitting.split()), name
        how = ChatParsing(tools=tools, tool_format=TOOL_FORMATS[name])
        if name not in fitting.split():
            assert [call[1:] for call in how.parse('{"a": 1}', (), "stop").calls] == [("f", '{"a": 1}')]
    assert TOOL_FORMATS["seed_oss"].forced_form(forcing({"type": "object"}, "two words")) is None


@pytest.mark.parametrize("name", ["seed_oss", "gemma4", "pythonic"])
def test_any_arguments_may_be_forced(name: str) -> None:
    """Oracle: by hand, for a tool that does not name its arguments."""
    text = {
        "seed_oss": f"<seed:tool_call>\n<function=f>\n{PART}k>\nv{P_END}</function>\n</seed:tool_call>",
        "gemma4": f"<|tool_call>call:f{{k:{G}v{G},n:1}}<tool_call|>",
        "pythonic": '[f(k="v", n=[1])]',
    }[name]
    assert forced_output(name, forcing({"type": "object"}), text)
    closed = forcing({"type": "object", "additionalProperties": False})
    assert not forced_output(name, closed, text)


def test_a_schema_may_contain_itself() -> None:
    """Oracle: by hand, in a language whose lists and objects are not JSON; and one with 8 ** 12 ways through it."""
    tree: dict[str, object] = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/T"}},
    }
    tools = forcing({"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}, "$defs": {"T": tree}})
    assert forced_output("gemma4", tools, "<|tool_call>call:f{t:{n:1,next:{next:{n:2}}}}<tool_call|>")
    assert not forced_output("gemma4", tools, "<|tool_call>call:f{t:{n:1,next:{next:{n:true}}}}<tool_call|>")
    levels: dict[str, object] = {
        f"d{level}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{level + 1}"} for key in "abcdefgh"}}
        for level in range(12)
    }
    wide: dict[str, object] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**levels, "d12": {"type": "null"}},
    }
    for name in ("gemma4", "seed_oss", "pythonic"):
        assert TOOL_FORMATS[name].forced_form(forcing(wide)) is not None
    assert forced_output("gemma4", forcing(wide), "<|tool_call>call:f{a:{h:{b:{}}}}<tool_call|>")


def test_many_forced_tools_fit_in_a_grammar() -> None:
    """Oracle: the grammar compiles; 128 tools of 12 arguments have few kinds of values, which share their rules."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}},
             {"enum": ["a", "b"]}]  # fmt: skip
    parameters = {"type": "object", "properties": {f"p{i}": kinds[i % 4] for i in range(12)}}
    tools = ToolRequest(
        tools=tuple({"function": {"name": f"tool_{number}", "parameters": parameters}} for number in range(128)),
        choice="required",
    )
    assert forced_output("seed_oss", tools, "<seed:tool_call>\n<function=tool_127>\n</function>\n</seed:tool_call>")
    assert forced_output("gemma4", tools, "<|tool_call>call:tool_127{}<tool_call|>")
