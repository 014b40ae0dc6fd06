"""Tool calls in generated text: which calls are found; no split of the text changes them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from tp_engine.api.openai.chat.parser import ChatParsing
from tp_engine.api.openai.tools.events import CallArguments, CallStarted, ContentText, ReasoningText
from tp_engine.api.openai.tools.forced import CallListParser, NamedCallParser
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.marked_calls import CallMarks
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.text_parser import TextParser

TOOLS = ToolRequest(
    tools=tuple({"function": {"name": name}} for name in ("get_weather", "add", "größe")), choice="auto"
)
MARKUP = ("<tool_call", "</tool_call", "<|python_tag|>", "tool_call>", "<|tool_call", "[TOOL_CALLS]")


@dataclass
class Found:
    """All events of one text, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def add(self, event: object) -> None:
        match event:
            case ReasoningText(text):
                assert text
                self.reasoning += text
            case ContentText(text):
                assert text
                self.content += text
            case CallStarted(index, call_id, name):
                assert index == len(self.calls) and call_id
                self.calls.append((name, ""))
            case CallArguments(index, text):
                assert text and index == len(self.calls) - 1
                name, before = self.calls[index]
                self.calls[index] = (name, before + text)
            case _:
                raise AssertionError(event)
        kind = {ContentText: "text", ReasoningText: "reasoning"}.get(type(event), "call")
        self.order += [kind] if self.order[-1:] != [kind] else []


def find(parser: TextParser, pieces: Iterable[str], cut_off: bool = False) -> Found:
    found = Found()
    for piece in pieces:
        for event in parser.feed(piece):
            found.add(event)
    for event in parser.finish(cut_off=cut_off):
        found.add(event)
    return found


def hermes() -> TextParser:
    return TOOL_FORMATS["hermes"].new_parser(TOOLS)


def llama() -> TextParser:
    return TOOL_FORMATS["llama3_json"].new_parser(TOOLS)


ARGUMENTS = '{"city": "Zürich 😀", "n": {"deep": [1, {"x": "a}b]c"}]}, "q": "say \\"hi\\" </tool_call> {"}'

# text -> content, calls
HERMES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "": ("", []),
    " just text, 1 < 2 and <tool> \n": (" just text, 1 < 2 and <tool> \n", []),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>': ("", [("add", '{"a": 1}')]),
    f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>': ("", [("get_weather", ARGUMENTS)]),
    # As Hermes 2 Pro was trained: the arguments first.
    f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "get_weather"}}\n</tool_call>': (
        "",
        [("get_weather", ARGUMENTS)],
    ),
    'I look.\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "add", '
    '"arguments": {"a": []}}\n</tool_call>\n': ("I look.", [("add", "{}"), ("add", '{"a": []}')]),
    'Before <tool_call>{"name":"add","arguments":{}}</tool_call> after 中文 ': ("Before  after 中文", [("add", "{}")]),
    '<tool_call>{"name": "add"}</tool_call>\n\nDone.': ("Done.", [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": null, "id": 7}</tool_call>': ("", [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\u00fc\\"}"}</tool_call>': ("", [("add", '{"a": "ü"}')]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\n\\"}"}</tool_call>': ("", [("add", '{"a": "\\n"}')]),
    '<tool_call>{"name": "add", "arguments": "hello \\"you\\""}</tool_call>': ("", [("add", '"hello \\"you\\""')]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": "}</tool_call>': ("", [("add", '"{\\"a\\": "')]),
    '<tool_call>{"arguments": {"a": "  x  "}, "name": "add"}</tool_call>': ("", [("add", '{"a": "  x  "}')]),
    '<tool_call>{"name": "gr\\u00f6\\u00dfe", "arguments": {}}</tool_call>': ("", [("größe", "{}")]),
    '<tool_call>[{"name": "add", "arguments": {}}, {"name": "x", "arguments": {}}]</tool_call>': (
        "",
        [("add", "{}"), ("x", "{}")],
    ),
    '<tool_call>{"name": "add", "arguments": {"text": "two\nlines\t."}}</tool_call>': (
        "",
        [("add", '{"text": "two\\nlines\\t."}')],
    ),
    '{"name": "add", "arguments": {}} is no call': ('{"name": "add", "arguments": {}} is no call', []),
    # Not as trained: no text may be lost.
    "<tool_call>add(1, 2)</tool_call>": ("<tool_call>add(1, 2)</tool_call>", []),
    '<tool_call>{"function": "add"}</tool_call>!': ('<tool_call>{"function": "add"}</tool_call>!', []),
    '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> ok': ("ok", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add", "arguments": {}} oops</tool_call> ok': ("ok", [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "x", "arguments": {}}': (
        "",
        [("add", "{}"), ("x", "{}")],
    ),
    "<tool_call>\n</tool_call>": ("", []),
    "ends with <tool_ca": ("ends with <tool_ca", []),
}

LLAMA: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "": ("", []),
    " plain {text} with { braces }\n": (" plain {text} with { braces }\n", []),
    '{"name": "add", "parameters": {"a": 1}}': ("", [("add", '{"a": 1}')]),
    f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}': ("", [("get_weather", ARGUMENTS)]),
    f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}': ("", [("get_weather", ARGUMENTS)]),
    '{"type": "function", "name": "add", "arguments": {}}': ("", [("add", "{}")]),
    '{"name": "add", "parameters": {}}; {"name": "größe", "parameters": {"x": ";"}}': (
        "",
        [("add", "{}"), ("größe", '{"x": ";"}')],
    ),
    'I add.\n{"name": "add", "parameters": {}}\nThat was it.': ("I add.\n\nThat was it.", [("add", "{}")]),
    'I add. <|python_tag|>{"name": "add", "parameters": {}} <|python_tag|> {"name": "add", "parameters": {"b": 2}};': (
        "I add.",
        [("add", "{}"), ("add", '{"b": 2}')],
    ),
    '{"name": "add", "parameters": {}}; and so on': ("; and so on", [("add", "{}")]),
    '{"name": "add", "parameters": null}': ("", [("add", "{}")]),
    '{"name": "Bob", "parameters": {"age": 3}}': ('{"name": "Bob", "parameters": {"age": 3}}', []),
    '<|python_tag|>{"name": "unheard_of", "parameters": {}}': ("", [("unheard_of", "{}")]),
    '{"answer": {"name": "add", "parameters": {"a": 1}}}': ('{"answer": }', [("add", '{"a": 1}')]),
    '{{"name": "add", "parameters": {}}': ("{", [("add", "{}")]),
    '{"name": "add"}': ('{"name": "add"}', []),
    '{"answer": 5}': ('{"answer": 5}', []),
    '{"name": "add", "parameters": {invalid json}': ('{"name": "add", "parameters": {invalid json}', []),
    '{"name": "add", "parameters": { 1}}': ('{"name": "add", "parameters": { 1}}', []),
    '{"name": "add", "parameters": [1]}': ('{"name": "add", "parameters": [1]}', []),
    '{"name": "add", "parameters": { "a": "b c" }}': ("", [("add", '{ "a": "b c" }')]),
    '<|python_tag|>{"name": "add", "parameters": {invalid json}}': (
        '{"name": "add", "parameters": {invalid json}}',
        [],
    ),
    '<|python_tag|>{"parameters": {"a": 1}, "name": "add"}': ("", [("add", '{"a": 1}')]),
    "<|python_tag|>print(1)": ("print(1)", []),
    "<|python_tag": ("<|python_tag", []),
}

LIST = f'[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "größe", "arguments": {{}}}}]'
LISTED = [("add", ARGUMENTS), ("größe", "{}")]
GRANITE: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "": ("", []),
    " just text, [1] < 2 <|tool \n": (" just text, [1] < 2 <|tool \n", []),
    f"<|tool_call|>{LIST}": ("", LISTED),
    "<|tool_call|> " + LIST.replace("}, {", "},\n{"): ("", LISTED),
    f"I look.\n<tool_call>{LIST}": ("I look.", LISTED),
    f"A <|tool_call|>{LIST}\n\nAnd 中文 ": ("A \n\nAnd 中文", LISTED),
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "x"}\n</tool_call> ok': (
        "ok",
        [("add", "{}"), ("x", "{}")],
    ),
    "<|tool_call|>[]": ("", []),
    "<|tool_call|>add(1)": ("<|tool_call|>add(1)", []),
    '<|tool_call|>[{"name": "add", "arguments": {"a": <}}] <|tool_call|>[{"name": "x", "arguments": {}}]': (
        "",
        [("add", '{"a": '), ("x", "{}")],
    ),
}

MISTRAL: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "": ("", []),
    " just text, [1] < 2 and [TOOL \n": (" just text, [1] < 2 and [TOOL \n", []),
    f"[TOOL_CALLS]{LIST}": ("", LISTED),
    f"Let me see. [TOOL_CALLS] {LIST}": ("Let me see.", LISTED),
    f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}": ("", [("add", ARGUMENTS)]),
    f"I add.\n[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]größe[ARGS]{{}}": ("I add.", LISTED),
    f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS] größe {{}} Done.": ("Done.", LISTED),
    '[TOOL_CALLS]add[CALL_ID]aB3456789[ARGS]{"a": {"b": "[TOOL_CALLS]"}}': (
        "",
        [("add", '{"a": {"b": "[TOOL_CALLS]"}}')],
    ),
    '[TOOL_CALLS]{"name": "add", "arguments": {}}': ("", [("add", "{}")]),
    "[TOOL_CALLS]not a call": ("[TOOL_CALLS]not a call", []),
    "[TOOL_CALLS]not a call {}": ("[TOOL_CALLS]not a call {}", []),
    "[TOOL_CALLS]add[ARGS]5": ("[TOOL_CALLS]add[ARGS]5", []),
    "[TOOL_CALLS][1, 2]": ("[TOOL_CALLS][1, 2]", []),
    '[TOOL_CALLS]add[ARGS]{"a": <}[TOOL_CALLS]x[ARGS]{}': ("", [("add", '{"a": '), ("x", "{}")]),
}

ERNIE: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "": ("", []),
    " \n": (" \n", []),
    "plain <response> text </response> ": ("plain <response> text </response> ", []),
    "\n<response>\nIt is 4.\n\nYes </resp> 中文\n</response>\n": ("It is 4.\n\nYes </resp> 中文", []),
    "<response>\nhalf": ("half", []),
    "<response></response>": ("", []),
    f'<response>\nI add.\n</response>\n\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n': (
        "I add.",
        [("add", ARGUMENTS)],
    ),
    '\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n\n<tool_call>{"name": "x"}</tool_call>': (
        "",
        [("add", "{}"), ("x", "{}")],
    ),
    "<response>a</response> <response>b</response>": ("a <response>b</response>", []),
    "<respon": ("<respon", []),
}


# As Step3 writes them.
STEP_MARKS = CallMarks(
    open="<calls>",
    close="</calls>",
    call='<call>function<sep><steptml:invoke name="',
    call_end="</steptml:invoke></call>",
    name_ends=(">",),
    key='<steptml:parameter name="',
    key_end=">",
    value_end="</steptml:parameter>",
)
STEP_CALL = (
    '<call>function<sep><steptml:invoke name="add"><steptml:parameter name="n">1</steptml:parameter>'
    "</steptml:invoke></call>"
)
STEP = {f"<calls>{STEP_CALL}{STEP_CALL}</calls> ok": ("ok", [("add", '{"n": 1}')] * 2)}


def step() -> TextParser:
    return STEP_MARKS.format("Step3").new_parser(TOOLS)


def granite() -> TextParser:
    return TOOL_FORMATS["granite"].new_parser(TOOLS)


def mistral() -> TextParser:
    return TOOL_FORMATS["mistral"].new_parser(TOOLS)


def ernie() -> TextParser:
    return TOOL_FORMATS["ernie45"].new_parser(TOOLS)


TEXTS = {hermes: HERMES, llama: LLAMA, granite: GRANITE, mistral: MISTRAL, ernie: ERNIE}
TEXTS |= {step: STEP}
CASES = [(parser, text, *expected) for parser, texts in TEXTS.items() for text, expected in texts.items()]
Maker = Callable[[], TextParser]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_every_split(parser: Maker, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Whole, in two and three pieces, and character by character. Oracle: content and calls written out by hand."""
    whole = find(parser(), [text])
    assert (whole.content, whole.calls) == (content, calls)
    assert find(parser(), text) == whole
    places = range(len(text) + 1)
    for first in places:
        assert find(parser(), [text[:first], text[first:]]) == whole, text[:first]
    pairs = [(one, other) for one in places for other in places if one < other]
    for first, second in random.Random(3).sample(pairs, min(len(pairs), 80)):
        assert find(parser(), [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize(("parser", "text", "content", "calls"), [case for case in CASES if case[3]])
def test_cut_off_by_a_limit(parser: Maker, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Oracle: for any cut of the end, a beginning of the whole answer; no markup; streamed equals whole."""
    for end in range(len(text)):
        found = find(parser(), [text[:end]], cut_off=True)
        assert find(parser(), text[:end], cut_off=True) == found
        assert content.startswith(found.content) or found.content.rstrip(" ;{\n") in content
        assert not any(mark in found.content for mark in MARKUP)
        assert [name for name, _ in found.calls] == [name for name, _ in calls][: len(found.calls)]
        for (_, part), (_, whole) in zip(found.calls, calls, strict=False):
            assert whole.startswith(part)


def test_half_an_escape_is_not_lost() -> None:
    """Oracle: the arguments as the model wrote them, up to any cut."""
    head, arguments = '<tool_call>{"name": "f", "arguments": ', r'{"a": "C:\\x \" \u00e9"'
    for end in range(1, len(arguments)):
        for pieces in (head + arguments[:end], [head + arguments[:end]]):
            ((_, part),) = find(hermes(), pieces, cut_off=True).calls
            assert part == arguments[:end]


@pytest.mark.parametrize("parser", TEXTS)
def test_random_splits_of_random_conversations(parser: Maker) -> None:
    """Oracle: the text in one piece; the JSON arguments that the test put in."""
    rng = random.Random(5)
    fragments = [*TEXTS[parser], "\n", "{", "<", "</tool_call>", "中", " ;"]
    for _ in range(200):
        text = "".join(rng.choices(fragments, k=rng.randint(1, 4)))
        whole = find(parser(), [text])
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, 9)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert find(parser(), pieces) == whole


def test_arguments_come_before_the_call_ends() -> None:
    """Oracle: a stream's client sees name and first argument while the model still writes."""
    for parser, text in (
        (hermes(), '<tool_call>{"name": "add", "arguments": {"a": 1'),
        (llama(), '{"name": "add", "parameters": {"a": 1'),
    ):
        started, arguments = parser.feed(text)
        assert isinstance(started, CallStarted) and started.name == "add"
        assert arguments == CallArguments(0, '{"a": 1')


def test_ids_that_mistral_takes() -> None:
    """Oracle: the rule of the models' chat templates; a forced call has such an id, too."""
    for tools in (TOOLS, replace(TOOLS, choice="required"), replace(TOOLS, choice="named", name="add")):
        parsing = ChatParsing(tools=tools, tool_format=TOOL_FORMATS["mistral"], forced="a grammar")
        message = parsing.parse('[TOOL_CALLS][{"name": "add", "arguments": {}}]', [], "stop")
        assert re.fullmatch("[0-9a-zA-Z]{9}", message.calls[0][0])


CALLS = '[{"name": "add", "parameters": {"a": [1, "]"]}}, {"name": "größe", "parameters": {}}]'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALLS, "", [("add", '{"a": [1, "]"]}'), ("größe", "{}")]),
        (CALLS.replace(" ", "\n"), "", [("add", '{"a":\n[1,\n"]"]}'), ("größe", "{}")]),
        ("no list", "no list", []),
        ("[]", "[]", []),
    ],
)
def test_required_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Oracle: by hand; every split in two, and character by character."""
    for first in range(len(text)):
        found = find(CallListParser(), [text[:first], text[first:]])
        assert (found.content, found.calls) == (content, calls)
    assert find(CallListParser(), text).calls == calls


def test_required_calls_cut_off() -> None:
    """Oracle: the beginning of the whole calls, and no brackets."""
    found = find(CallListParser(), CALLS[:-25], cut_off=True)
    assert (found.content, found.calls[0]) == ("", ("add", '{"a": [1, "]"]}'))


def test_a_named_call_is_its_arguments() -> None:
    """Oracle: the text itself, with its JSON."""
    text = json.dumps({"a": "{[</tool_call>"})
    for first in range(len(text)):
        assert find(NamedCallParser("add"), ["\n", text[:first], text[first:]]).calls == [("add", text)]
    assert find(NamedCallParser("add"), [" "]) == Found()


def test_long_strings_of_braces_take_linear_time() -> None:
    """Oracle: the text itself, well within the test's limit."""
    for text in ("{" * 20_000, '{"name": "' * 2_000, '{"parameters": ' * 2_000, "<|python" * 2_000):
        assert find(llama(), [text[i : i + 4] for i in range(0, len(text), 4)]).content == text
