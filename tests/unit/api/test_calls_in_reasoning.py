"""Calls inside of reasoning that the model has not closed: the call ends the reasoning, whatever its format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.reasoning import REASONING_ALIASES, REASONING_FORMATS, Beginning
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = ToolRequest(tools=({"function": {"name": "get_weather", "parameters": PARAMETERS}},), choice="auto")
OBJECT = '{"name": "get_weather", "arguments": {"city": "Köln </think>"}}'
ARGUMENTS = '{"city": "Köln </think>"}'
QWEN = "<function=get_weather>\n<parameter=city>\nKöln </think>\n</parameter>\n</function>"
# The format of calls, the format of reasoning that such models have, and a call.
CALLS = {
    "hermes": ("qwen3", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen3_coder": ("qwen3", f"<tool_call>\n{QWEN}\n</tool_call>"),
    "qwen3_coder, no block": ("qwen3", QWEN),
    "glm45": (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln </think></arg_value>\n</tool_call>",
    ),
    "minimax_m2": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln </think></parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "ernie45": ("ernie45", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "mistral": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps({'city': 'Köln </think>'}, ensure_ascii=False)}"),
    "granite": ("granite", f"<|tool_call|>[{OBJECT}]"),
    "deepseek_v3": (
        "qwen3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": (
        "qwen3",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        "Köln </think></｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "seed_oss": ("seed_oss", f"<seed:tool_call>\n{QWEN}\n</seed:tool_call>"),
    "gemma4": ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Köln </think><|"|>}<tool_call|>'),
    "cohere_command3": (
        "cohere_command3",
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}}]'
        "<|END_ACTION|>",
    ),
    "olmo3": ("olmo3", "<function_calls>get_weather(city='Köln </think>')</function_calls>"),
    "lfm2": ("qwen3", "<|tool_call_start|>[get_weather(city='Köln </think>')]<|tool_call_end|>"),
    "deepseek_v4": (
        "qwen3",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        "Köln </think></｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "hy_v3": (
        "hy_v3",
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>Köln </think></arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
    ),
    "hy_v3, no block": (
        "hy_v3",
        "<tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Köln </think></arg_value></tool_call>",
    ),
    "solar_open": (
        "solar_open",
        f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{ARGUMENTS}"
        "<|tool_call:end|><|calls|>",
    ),
    "minicpm5": ("qwen3", '<function name="get_weather"><param name="city">Köln </think></param></function>'),
    "nemotron_v2": ("qwen3", f"<TOOLCALL>[{OBJECT}]</TOOLCALL>"),
    "phi4_mini_json": ("qwen3", f"functools[{OBJECT}]"),
    "pythonic": ("qwen3", "<|python_start|>[get_weather(city='Köln </think>')]<|python_end|>"),
    "llama3_json": ("deepseek_r1", f"<|python_tag|>{OBJECT.replace('arguments', 'parameters')}"),
}


def parsing(tools: str, reasoning: str, begins: Beginning = Beginning.REASONING, **fields: Any) -> ChatParsing:
    form = REASONING_FORMATS[REASONING_ALIASES.get(reasoning, reasoning)]
    counter = form.tokens(byte_level_tokenizer())
    return ChatParsing(
        tools=TOOLS, tool_format=TOOL_FORMATS[tools], reasoning=form, begins=begins, reasoning_tokens=counter, **fields
    )


def streamed(how: ChatParsing, *pieces: str) -> tuple[Any, ...]:
    parser, message = how.new_parser(), ParsedMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish("stop"))
    return (*found(message), parser.finish_reason("stop"))


def found(message: ParsedMessage) -> tuple[Any, ...]:
    return message.reasoning, message.content, [(name, json.loads(arguments)) for _, name, arguments in message.calls]


def every_split(how: ChatParsing, text: str) -> tuple[Any, ...]:
    """What is found in ``text``; every split must give the same."""
    whole = how.parse(text, (), "stop")
    expected = (*found(whole), whole.finish_reason)
    assert streamed(how, *text) == expected
    for first in range(len(text) + 1):
        assert streamed(how, text[:first], text[first:]) == expected, text[:first]
        assert streamed(how, text[:first], text[first : first + 5], text[first + 5 :]) == expected, text[:first]
    return expected


@pytest.mark.parametrize("begins", [Beginning.REASONING, Beginning.EITHER])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_the_reasoning(name: str, begins: Beginning) -> None:
    """Oracle: by hand; a mark inside of the arguments closes nothing, one behind the call is not shown."""
    reasoning, call = CALLS[name]
    how = parsing(name.partition(",")[0], reasoning, begins)
    form = REASONING_FORMATS[REASONING_ALIASES.get(reasoning, reasoning)]
    opens, close = form.opens[0], form.closes[0]
    call = call.replace("</think>", close)
    first = opens if begins is Beginning.EITHER else ""
    expected = ("I look.", "", [("get_weather", {"city": f"Köln {close}"})], "tool_calls")
    assert every_split(how, f"{first}\nI look.\n\n{call}") == expected
    assert every_split(how, f"{first}{call}") == ("", *expected[1:])
    if name in (
        "mistral",
        "granite",
        "llama3_json",
        "phi4_mini_json",
        "gemma4",
        "qwen3_coder, no block",
        "hy_v3, no block",
        "minicpm5",
        "solar_open",
    ):  # text behind their calls has other rules
        return
    assert every_split(how, f"{first}I look. {call}\n{close}\n\nSo. {close}") == (
        "I look.",
        f"\n\nSo. {close}",
        *expected[2:],
    )
    two = every_split(how, f"{first}I look.{call}{call}")
    assert two[0] == "I look." and len(two[2]) == 2


PROSE = [
    "Shall I write <tool_call> here? No, <tool_call>s need an object: <tool_call>{x}.",
    "It ends with <tool_call",
    "<tool_call>{",
]


@pytest.mark.parametrize("prose", PROSE)
@pytest.mark.parametrize("name", ["hermes", "glm45", "qwen3_coder"])
def test_reasoning_may_speak_of_the_marks(name: str, prose: str) -> None:
    """Oracle: by hand: marks that no call follows are reasoning, and the call behind it is found."""
    reasoning, call = CALLS[name]
    how = parsing(name, reasoning)
    shown = prose.strip()
    assert every_split(how, prose)[:3] == (shown, "", [])
    assert how.parse(f"{prose} ", (), "length").content == ""
    assert every_split(how, f"{prose}\n</think>\n\nI look. {call}")[:2] == (shown, "I look.")
    assert every_split(how, f"{prose}</think>{call}")[2][0][0] == "get_weather"


def test_forced_and_constrained_answers_have_no_calls_in_their_reasoning() -> None:
    """Oracle: by hand: the grammar lets the reasoning go on up to its closing mark."""
    _, call = CALLS["hermes"]
    how = parsing("hermes", "qwen3", constrained=True)
    assert every_split(how, f"A {call.replace(' </think>', '')}</think>{{}}")[1:3] == ("{}", [])


@pytest.mark.parametrize("begins", [Beginning.REASONING, Beginning.EITHER])
@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("I look. <tool_call>\n" + OBJECT + "\n</tool_call>", len("I look. <tool_call>")),
        ("A <tool_call> is JSON.</think>Yes.", len("A <tool_call> is JSON.</think>")),
        ("A <tool_call> is", len("A <tool_call> is")),
    ],
)
def test_tokens_of_the_reasoning(text: str, counted: int, begins: Beginning) -> None:
    """One token per character, whole and streamed. Oracle: by hand: the characters up to the mark's end."""
    first = "<think>" if begins is Beginning.EITHER else ""
    text = first + text.replace("ö", "o")
    how = parsing("hermes", "qwen3", begins)
    ids = [byte_level_tokenizer().encode(char, add_special_tokens=False)[0] for char in text]
    parser = how.new_parser()
    for char, token_id in zip(text, ids, strict=True):
        parser.feed(char, [token_id])
    parser.finish("stop")
    assert how.parse(text, ids, "stop").num_reasoning_tokens == len(first) + counted
    assert parser.num_reasoning_tokens == len(first) + counted
