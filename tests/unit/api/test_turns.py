"""Calls of tools and their answers, in turns that a template takes; the shapes of templates are those of real ones."""

from __future__ import annotations

import gc
import json
import re
import time
from typing import Any

import pytest

from tests.asgi import App
from tests.chat_templates import LLAMA_LIKE, QWEN_LIKE
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.api.test_chat_answers import last_request, serve, speaking
from tp_engine.api.openai.chat.capabilities import TemplateCapabilities
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.chat.template import ChatTemplate
from tp_engine.api.openai.chat.turns import shorten_ids, with_answers
from tp_engine.server.config import ServerConfig

# Shows the first call of a message, and drops the others without a word.
FIRST_ONLY = QWEN_LIKE.replace("for call in message.tool_calls", "for call in message.tool_calls[:1]")
# Looks for the answers right behind the calls, and shows no others.
LOOKS_AHEAD = """\
{%- for m in messages %}
    {%- if m.role != 'tool' %}{{- '<' + m.role + '>' + (m.content or '') }}{%- endif %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}{{- '[' + call.function.name }}{{- call.function.arguments | tojson + ']' }}
        {%- endfor %}
        {%- set ns = namespace(over=false) %}
        {%- for later in messages[loop.index:] %}
            {%- if later.role != 'tool' %}{%- set ns.over = true %}{%- endif %}
            {%- if not ns.over %}{{- '<answer>' + later.content }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
"""
# Takes ids of nine letters and digits, and users and assistants in turn, but for calls and their answers.
ALTERNATES = """\
{%- set ns = namespace(n=0) %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.n = ns.n + 1 %}
    {%- endif %}
    {%- if m.tool_calls %}{{- m.content }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('nine letters, please') }}{%- endif %}
            {{- '[' + call.id + ':' + call.function.name }}{{- call.function.arguments | tojson + ']' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{- raise_exception('nine letters, please') }}{%- endif %}
        {{- '<' + m.tool_call_id + '>' + m.content }}
    {%- else %}{{- '<' + m.role + '>' + m.content }}{%- endif %}
{%- endfor %}
"""
TEMPLATES = {
    "one": LLAMA_LIKE, "first": FIRST_ONLY, "ahead": LOOKS_AHEAD, "alternates": ALTERNATES, "any": QWEN_LIKE,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "MK0"}


def call(name: str, text: str) -> dict[str, Any]:
    return {"id": f"toolu_{name}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}


def calling(*calls: dict[str, Any], text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def unnamed(text: str) -> dict[str, Any]:
    """A call that has no id, not even null."""
    return {name: value for name, value in call("", text).items() if name != "id"}


def answer(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"toolu_{name}", "content": text}


TWO = calling(call("1", "MK1"), call("2", "MK2"))
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "two calls": [USER, TWO, answer("1", "MK3"), answer("2", "MK4")],
    "in another order": [USER, TWO, answer("2", "MK3"), answer("1", "MK4")],
    "one answer": [USER, TWO, answer("2", "MK3"), said("user", "MK4")],
    "the user between": [USER, calling(call("1", "MK1")), said("user", "MK2"), answer("1", "MK3")],
    "the user between two": [USER, TWO, answer("1", "MK3"), said("user", "MK4"), answer("2", "MK5")],
    "loops": [USER, TWO, answer("1", "MK3"), answer("2", "MK4"), calling(call("1", "MK5")), answer("1", "MK6"),
              said("assistant", "MK7"), said("user", "MK8")],
    "no ids": [USER, calling(*({**one, "id": None} for one in TWO["tool_calls"])), said("tool", "MK3"),
               said("tool", "MK4"), said("assistant", "MK5"), calling(unnamed("MK6")), said("tool", "MK7")],
    "ids that are numbers": [USER, calling({**call("1", "MK1"), "id": 7}), {**answer("1", "MK2"), "tool_call_id": 7}],
    "an answer without its call": [USER, answer("9", "MK1"), said("assistant", "MK2"), said("user", "MK3")],
}  # fmt: skip


def render(source: str, messages: list[dict[str, Any]]) -> str:
    chosen = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=source))
    return chosen.render(messages, {"tools": TOOLS}, adapts_calls=True).text


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_of_a_history_is_lost_or_refused(name: str, history: str) -> None:
    """Oracle: every text of the history is in the prompt, once, and each answer behind its call."""
    messages = HISTORIES[history]
    shown = re.findall(r"MK\d", render(TEMPLATES[name], messages))
    assert sorted(shown) == sorted(set(re.findall(r"MK\d", json.dumps(messages)))), shown
    for one in messages:
        for made in one.get("tool_calls", ()):
            text = json.loads(made["function"]["arguments"])["a"]
            answers = [two["content"] for two in messages if two.get("tool_call_id", "") == made.get("id")]
            assert all(shown.index(text) < shown.index(found) for found in answers if "loops" not in history)


def test_what_templates_take_is_found_out() -> None:
    """Oracle: the texts of the templates, by hand."""
    found = {}
    for name, source in TEMPLATES.items():
        takes = TemplateCapabilities.of(ChatTemplate(source), {"bos_token": "<s>"})
        found[name] = takes.one_call, takes.answers_first, takes.short_ids
    assert found == {
        "one": (True, False, False),
        "first": (True, False, False),
        "ahead": (False, True, False),
        "alternates": (False, True, True),
        "any": (False, False, False),
    }


def test_a_text_of_the_assistant_between_a_call_and_its_answer() -> None:
    """Oracle: beside the call where the template needs the answer next; in its place elsewhere."""
    messages = [USER, calling(call("1", "A"), text="B"), said("assistant", "C"), answer("1", "D"), said("user", "E")]
    assert render(LOOKS_AHEAD, messages).startswith('<user>MK0<assistant>B\n\nC[f{"a": "A"}]<answer>D<user>E')
    assert re.sub(r"[^A-E]", "", render(QWEN_LIKE, messages).partition("MK0")[2]) == "BACDE"
    again = [*messages[:3], answer("1", "D"), said("assistant", "E"), said("user", "F")]
    assert render(ALTERNATES, again).endswith("D<assistant>E<user>F")


def test_what_interrupts_a_call_is_no_part_of_it() -> None:
    """Oracle: a call without an answer stays as it is, and so does what follows."""
    messages = [USER, calling(call("1", "A")), said("user", "stop"), said("assistant", "ok"), said("user", "go")]
    turns = with_answers(messages, one_call=True, answers_first=True)
    assert turns == messages
    stray = [answer("1", "early"), *messages, answer("9", "of no call")]
    assert with_answers(stray, one_call=True, answers_first=True) == stray


def test_ids_are_shortened_alike_in_every_request() -> None:
    """Oracle: nine letters and digits; ids that are so already stay; equal ids and only those become equal."""
    ids = ["toolu_01A09q90qw90lq917835lq9", "call_abc", "functions.weather:0", "abcdefghi", "a-b-c-d-e", ""]
    messages = [
        calling(*({**call("", ""), "id": one} for one in ids)),
        *({**answer("", ""), "tool_call_id": one} for one in ids),
    ]
    messages.append({**answer("", ""), "tool_call_id": "unknown"})
    shorten_ids(messages)
    made = [one["id"] for one in messages[0]["tool_calls"]]
    assert [one["tool_call_id"] for one in messages[1:-1]] == made and len(set(made)) == len(ids)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in (*made, messages[-1]["tool_call_id"]))
    assert made[3] == "abcdefghi"


def test_many_calls_are_placed_in_linear_time() -> None:
    """Oracle: twice the messages take about twice the processor time, whatever their order."""

    def seconds(number: int) -> float:
        calls = [calling(call(str(one), "A"), call(f"{one}b", "B")) for one in range(number)]
        texts = [said("assistant", "x") for _ in range(number)]
        answers = [answer(str(one), "C") for one in reversed(range(number))]
        gc.disable()  # a collection takes as long as the whole process has objects
        try:
            started = time.process_time()
            turns = with_answers([*calls, *texts, *answers], one_call=True, answers_first=True)
            taken = time.process_time() - started
        finally:
            gc.enable()
        assert sum("tool_calls" in one for one in turns) == 2 * number
        return taken

    assert seconds(16_000) < 8 * seconds(4_000) + 0.2


def test_the_server_takes_back_its_own_two_calls() -> None:
    """Oracle: Llama's template raises for two calls in a message; the model makes two, and both answers reach it."""
    text = '{"name": "f", "parameters": {"a": "MK1"}}; {"name": "f", "parameters": {"a": "MK2"}}'
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS}

    async def scenario(app: App) -> None:
        message = (await app.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        calls = message["tool_calls"]
        assert len(calls) == 2
        results = [{"role": "tool", "tool_call_id": one["id"], "content": f"MK{3 + n}"} for n, one in enumerate(calls)]
        again = await app.post("/v1/chat/completions", body | {"messages": [USER, message, *results]})
        assert again.status == 200, again.json()
        prompt = bytes(one for one in last_request(app).prompt_token_ids if one < 256).decode()
        assert re.findall(r"MK\d", prompt) == ["MK0", "MK1", "MK3", "MK2", "MK4"]

    serve(speaking(text), scenario, ServerConfig(chat_template=LLAMA_LIKE, tool_call_parser="llama3_json"))
