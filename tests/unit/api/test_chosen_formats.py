"""Formats of calls and of reasoning that the chat template chooses: exactly one for each model's marks."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest

from tests.chat_templates import QWEN_LIKE
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_chat_answers import CHAT, body, last_request, serve, speaking, whole
from tp_engine.api.openai.chat.options import TOOL_ALIASES, ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.reasoning import REASONING_FORMATS
from tp_engine.api.openai.tools.events import CallArguments, CallStarted
from tp_engine.api.openai.tools.forced_constraint import forced_grammar
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.server.config import ServerConfig

THINKS = "<think>x</think>"
# What tells of a model in the source of its template -> the formats of its calls and of its reasoning.
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "Qwen3": (f'{THINKS}<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call><tool_response>', "hermes", "qwen3"),
    "Qwen2.5": ("<tools></tools><tool_call></tool_call>", "hermes", None),
    "Granite 4": ("<|start_of_role|><tools><tool_call></tool_call>", "hermes", None),
    "EXAONE 4": (f"[|assistant|]{THINKS}<tool_call></tool_call><tool_result>", "hermes", "qwen3"),
    "Qwen3-Coder": ("<tool_call><function=a><parameter=b></parameter></function></tool_call>", "qwen3_coder", None),
    "Qwen3.5": (f"{THINKS}<tool_call><function=a><parameter=b></parameter></tool_call>", "qwen3_coder", "qwen3"),
    "Seed-OSS": ("<seed:think></seed:think><seed:tool_call><function=a><parameter=b>", "seed_oss", "seed_oss"),
    "GLM": (f"[gMASK]<sop>{THINKS}<tool_call>a<arg_key>b</arg_key><arg_value>", "glm45", "qwen3"),
    "Laguna": (f"</assistant>{THINKS}<tool_call>a<arg_key>b</arg_key><arg_value>", "glm45", "qwen3"),
    "MiniMax-M2": ("<minimax:tool_call><invoke name=><think></think>", "minimax_m2", "minimax_m2"),
    "ERNIE": (f"{THINKS}<response></response><tool_call></tool_call>", "ernie45", "ernie45"),
    "Mistral": ("[INST][/INST][TOOL_CALLS]", "mistral", None),
    "Magistral": ("[THINK][/THINK][TOOL_CALLS][ARGS]", "mistral", "mistral"),
    "Granite 3": ("<|start_of_role|><|tool_call|>Here is my thought process:", "granite", "granite"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    "Llama 3": ('{"name": f, "parameters": dictionary of argument name and its value}', "llama3_json", None),
    "Llama 3.2": ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", None),
    "DeepSeek R1": (f"{THINKS}<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\\n```json", "deepseek_v3", "qwen3"),
    "DeepSeek V3.1": ("</think><｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v31", "qwen3"),
    "DeepSeek V3.2": (f'{THINKS}<｜DSML｜function_calls><｜DSML｜invoke name="f">', "deepseek_v32", "qwen3"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    "Kimi K2 Thinking": (f"{THINKS}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "qwen3"),
    "Gemma 4": ("<|channel>thought\n<channel|><|tool_call>call:f{}<tool_call|><|tool_response>", "gemma4", "gemma4"),
    "Command R7B": (
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|><|START_RESPONSE|>",
        "cohere_command3",
        "cohere_command3",
    ),
    "Phi-4-mini": ("<|tool|>[]<|/tool|>", "phi4_mini_json", None),
    "OLMo 3": ("<functions></functions><function_calls></function_calls>", "olmo3", None),
    "OLMo 3 Think": (f"<functions>{{{{ message['function_calls'] }}}}{THINKS}", "olmo3", "qwen3"),
    "LFM2": ("<|tool_list_start|>[]<|tool_list_end|>", "lfm2", None),
    "DeepSeek V4": (f"{THINKS}{{% set mark = '｜DSML｜' %}}<{{{{ mark }}}}tool_calls>", "deepseek_v4", "qwen3"),
    "Hy3": ("{% set v = ':x' %}{{ '<think{}>'.format(v) }}<tool_call{}><tool_sep{}><arg_key{}>", "hy_v3", "hy_v3"),
    "Hy3, written out": ("<think:opensource><tool_calls:opensource><tool_sep:opensource><arg_key:opensource>", "hy_v3",
                         "hy_v3"),
    "Hy3, first tokens": (f"{THINKS}<tool_calls><tool_call>f<tool_sep><arg_key>", "hy_v3", "qwen3"),
    "Solar Open": ("<|begin|>assistant<|think|><|end|><|tool_calls|><|tool_call:begin|><|calls|>", "solar_open",
                   "solar_open"),
    "MiniCPM5": (f'{THINKS}<tool_sep><function name="f"><param name="p">v</param></function>', "minicpm5", "qwen3"),
    "Nemotron Nano v2": ("<think></think><TOOLCALL>[]</TOOLCALL>", "nemotron_v2", "qwen3"),
    "Apriel 1.5": ('in <tool_call></tool_call> tags: <tool_calls>[{"name": f}]</tool_calls>', None, None),
    "a model without tools": ("<|user|><|assistant|>", None, None),
}  # fmt: skip


@pytest.mark.parametrize("model", TEMPLATES)
def test_one_format_or_none_fits(model: str) -> None:
    """Oracle: by hand."""
    template, tools, reasoning = TEMPLATES[model]
    fits = [
        [name for name, one in formats.items() if any(marks.fit(template) for marks in one.template)]
        for formats in (TOOL_FORMATS, REASONING_FORMATS)
    ]
    assert fits == [[name] if name is not None else [] for name in (tools, reasoning)]
    chat = ChatFormat(
        byte_level_tokenizer(), ChatOptions(chat_template="{# " + template.replace("{", "") + " #}{{ 1 }}")
    )
    assert (chat.tool_format, chat.reasoning_format) == (
        None if tools is None else TOOL_FORMATS[tools],
        None if reasoning is None else REASONING_FORMATS[reasoning],
    )


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HY3 = "{# <think@><tool_call@><tool_sep@><arg_key@> #}{{ messages[0].content }}"
HY3_TAGS = ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
HY3_CALLS = (
    "<tool_calls@>\n<tool_call@>get_weather<tool_sep@>\n<arg_key@>city</arg_key@>\n<arg_value@>Ulm</arg_value@>\n"
    "</tool_call@>\n</tool_calls@>"
)


def hy3_tokenizer(*versions: str) -> Any:
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    names = [f"<{slash}{tag}{one}>" for one in versions for tag in HY3_TAGS for slash in ("", "/")]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


@pytest.mark.parametrize("version", [":opensource", ":v2.1-rl", ""])
def test_hy3_reads_the_marks_of_its_tokenizer(version: str) -> None:
    """Oracle: by hand: the marks of the version that the tokenizer has, and those without one."""
    options = ChatOptions(chat_template=HY3, tool_call_parser="hy_v3", reasoning_parser="hy_v3")
    chat = ChatFormat(hy3_tokenizer(version), options)
    assert chat.tool_format is not None and chat.reasoning_format is not None
    tools = ToolRequest(tools=(WEATHER,), choice="required")
    for mark in (version, ""):
        parser = chat.tool_format.new_parser(tools)
        events = [*parser.feed(HY3_CALLS.replace("@", mark)), *parser.finish(cut_off=False)]
        assert [one.name for one in events if isinstance(one, CallStarted)] == ["get_weather"]
        arguments = "".join(one.text for one in events if isinstance(one, CallArguments))
        assert json.loads(arguments) == {"city": "Ulm"}
    assert chat.reasoning_format.opens[0] == f"<think{version}>" and "</think>" in chat.reasoning_format.closes
    writing = TokenWriting.of(hy3_tokenizer(version))
    grammar = forced_grammar(tools, chat.tool_format, writing, StructuredOutputsParams(json={}), thinks=False)
    assert grammar is not None and writing.mark(f"<tool_sep{version}>") in grammar
    assert ChatFormat(hy3_tokenizer("", version), options).tool_format == chat.tool_format


def test_every_format_can_be_chosen() -> None:
    """Oracle: the table of formats; GLM's and R1's reasoning are those of Qwen3 for a template."""
    tools, reasoning = ({row[place] for row in TEMPLATES.values()} - {None} for place in (1, 2))
    assert tools == set(TOOL_FORMATS) and reasoning == set(REASONING_FORMATS) - {"glm45", "deepseek_r1"}
    assert not set(TOOL_ALIASES) & set(TOOL_FORMATS)


def said(caplog: pytest.LogCaptureFixture, **fields: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        ChatFormat(byte_level_tokenizer(), ChatOptions(**{"chat_template": QWEN_LIKE, **fields})).prepare()
    return [record.getMessage() for record in caplog.records]


def test_the_log_says_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: by hand: the format, why, and the flag that changes it."""
    tools, reasoning = said(caplog)
    assert (
        tools
        == "tool calls: hermes, as the chat template has <tool_call>; --tool-call-parser NAME, or none, changes that"
    )
    assert reasoning.startswith("reasoning: qwen3, as the chat template has </think>; --reasoning-parser NAME")
    assert all("none, by the chat template" in one for one in said(caplog, chat_template="{{ 1 }}"))
    assert said(caplog, tool_call_parser="none", reasoning_parser="none") == []
    assert said(caplog, tool_call_parser="qwen25", reasoning_parser="qwen3") == []
    [warning] = said(caplog, tool_call_parser="glm47", reasoning_parser="none")
    assert warning == "tool calls: --tool-call-parser is glm47, but the chat template is written for hermes"
    assert said(caplog, tool_call_parser="glm47", reasoning_parser="none", chat_template="{{ 1 }}") == []


def test_a_server_without_flags_finds_calls_and_reasoning() -> None:
    """Oracle: by hand."""

    async def scenario(app: Any) -> None:
        found = whole((await app.post(CHAT, body())).json())
        assert (found["reasoning"], found["content"]) == ("A tool.", "I look.")
        assert found["calls"] == [["get_weather", "{}"]] and found["finish_reason"] == "tool_calls"

    text = '<think>A tool.</think>I look.<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    for flag in (False, True):
        serve(speaking(text), scenario, ServerConfig(chat_template=QWEN_LIKE, enable_auto_tool_choice=flag))


@pytest.mark.parametrize(
    "fields", [{"chat_template": "{{ messages[0].content }}"}, {"chat_template": QWEN_LIKE, "tool_call_parser": "none"}]
)
def test_tools_without_a_known_format_are_refused(fields: Any) -> None:
    """Oracle: a 400 with the remedy; forced calls, and chats without tools, work."""

    async def scenario(app: Any) -> None:
        refused = await app.post(CHAT, body())
        assert refused.status == 400 and "--tool-call-parser" in json.dumps(refused.json())
        assert (await app.post(CHAT, body(tool_choice="required"))).status == 200
        assert (await app.post(CHAT, body(tools=None))).status == 200

    serve(speaking("[]"), scenario, ServerConfig(enable_auto_tool_choice=True, **fields))


KIMI = """{# <|tool_calls_section_begin|> #}{% for message in messages %}{% for call in message.tool_calls or [] %}
{{ call.id }} {% endfor %}{{ message.tool_call_id or '' }} {% endfor %}"""


def test_ids_of_kimi_are_numbered() -> None:
    """Ids of other models in the history, and those of the answer. Oracle: by hand: they count all calls."""
    names = ("get_weather", "add", "get_weather")
    calls = [{"id": f"call_{n}", "type": "function", "function": {"name": name}} for n, name in enumerate(names)]
    answers = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "x"} for n in (1, 0, 2)]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": calls[:2]},
        *answers[:2],
        {"role": "assistant", "tool_calls": calls[2:]},
        answers[2],
    ]

    async def scenario(app: Any) -> None:
        ids = ["functions.get_weather:0", "functions.add:1", "functions.get_weather:2"]
        chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=KIMI))
        assert chat.render(history, adapts_calls=True).text.split() == [*ids[:2], ids[1], ids[0], ids[2], ids[2]]
        assert chat.render(history).text.split()[:2] == ["call_0", "call_1"]
        answer = (await app.post(CHAT, body(messages=history))).json()
        assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["functions.get_weather:3"]
        forced = (await app.post(CHAT, body(messages=history, tool_choice="required"))).json()
        assert forced["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.get_weather:3"
        constraint = last_request(app).params.structured_outputs
        assert constraint is not None and '"functions.get_weather:" NUMBER' in str(constraint.grammar)

    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    serve(speaking(text), scenario, ServerConfig(chat_template=KIMI))
