"""Thinking that a request asks for, under every name that clients have for it, reaches the chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.anthropic.protocol import MessagesBody
from tp_engine.api.anthropic.requests import chat_body as messages_chat
from tp_engine.api.openai.chat.body import _template_options
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat, ChatPrompt
from tp_engine.api.openai.protocol import ChatBody, parse_body
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import chat_body as responses_chat

QUESTION = [{"role": "user", "content": "hi"}]
SAID = "{% for m in messages %}{{ m.content }};{% endfor %}"
ON, OFF = "<think>", "<think></think>"
# Switches of real templates, in one line each: those that think unless told otherwise, and those that do not.
THINKS = {
    "enable_thinking": "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}",
    "thinking": "{% if not thinking is defined %}{% set thinking = true %}{% endif %}"
    "{{ '<think>' if thinking else '<think></think>' }}",
    "reasoning": "{{ '<think></think>' if reasoning is defined and not reasoning else '<think>' }}",
    "thinking_mode": "{{ '<think></think>' if thinking_mode == 'disabled' else '<think>' }}",
    "thinking_budget": "{{ '<think></think>' if thinking_budget is defined and thinking_budget == 0 else '<think>' }}",
    "reasoning_effort": "{% if reasoning_effort is defined and reasoning_effort not in ['high', 'low', 'no_think'] %}"
    "{{ raise_exception('high, low or no_think') }}{% endif %}"
    "{{ '<think></think>' if reasoning_effort == 'no_think' else '<think>' }}",
    "lower": "{{ '<think></think>' if (reasoning_effort or '') | lower == 'none' else '<think>' }}",
}
DOES_NOT = {
    "enable_thinking": "{{ '<think>' if enable_thinking is defined and enable_thinking else '<think></think>' }}",
    "thinking": "{{ '<think>' if thinking else '<think></think>' }}",
    "thinking_mode": "{% set mode = thinking_mode | default('chat') %}"
    "{{ '<think>' if mode == 'thinking' else '<think></think>' }}",
}
# Every spelling of "do not think", and of "think".
NO: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"think": False},
    {"thinking_token_budget": 0},
    {"thinking_budget": 0},
    {"thinking": {"type": "disabled"}, "reasoning_effort": "high"},
    {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
]
YES: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"thinking": True}},
    {"enable_thinking": True},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high"},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": "medium"}},
    {"think": True},
    {"think": "high"},
    {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
]


def chats(fields: dict[str, Any]) -> list[ChatBody]:
    """The chats that ``fields`` make at each of the three APIs."""
    chat = parse_body(ChatBody, json.dumps({"messages": QUESTION, **fields}))
    messages = parse_body(MessagesBody, json.dumps({"messages": QUESTION, "max_tokens": 9, **fields}))
    responses = parse_body(ResponsesBody, json.dumps({"input": "hi", **fields}))
    return [chat, messages_chat(messages), responses_chat(responses)]


def template_of(source: str) -> ChatFormat:
    return ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=source))


def prompt_of(template: ChatFormat, body: ChatBody) -> ChatPrompt:
    return template.render(body.messages, _template_options(body), adapts_calls=True)


def render(source: str, effort: str | None = None, **options: Any) -> ChatPrompt:
    body = ChatBody.model_validate({"messages": QUESTION, "chat_template_kwargs": options, "reasoning_effort": effort})
    return prompt_of(template_of(source), body)


@pytest.mark.parametrize("name", THINKS)
def test_every_way_to_switch_thinking_off(name: str) -> None:
    """Oracle: the prompt that the template makes where thinking is off, by hand; structured output knows of it."""
    template = template_of(SAID + THINKS[name])
    assert template.render(QUESTION).text == f"hi;{ON}"
    for fields in NO:
        for body in chats(fields):
            prompt = prompt_of(template, body)
            assert (prompt.text, prompt.thinking_disabled) == (f"hi;{OFF}", True), (fields, body)
    for fields in YES:
        for body in chats(fields):
            prompt = prompt_of(template, body)
            assert (prompt.text, prompt.thinking_disabled) == (f"hi;{ON}", False), (fields, body)


@pytest.mark.parametrize("name", DOES_NOT)
def test_every_way_to_switch_thinking_on(name: str) -> None:
    """Oracle: by hand: a template that thinks only when asked is asked by any effort but none and minimal."""
    template = template_of(SAID + DOES_NOT[name])
    open_ones: list[dict[str, Any]] = [{}, {"reasoning_effort": "minimal"}, {"thinking": {"type": "auto"}}]
    for fields in open_ones + NO:
        assert {prompt_of(template, body).text for body in chats(fields)} == {f"hi;{OFF}"}
    for fields in YES:
        for body in chats(fields):
            assert prompt_of(template, body).text == f"hi;{ON}", fields


def test_a_templates_own_switch_is_the_clients() -> None:
    """Oracle: what the client set for the template itself stays, and a switch of another template follows it."""
    mode = SAID + DOES_NOT["thinking_mode"]
    assert render(mode, thinking_mode="thinking").text == f"hi;{ON}"
    assert render(mode, thinking_mode="thinking", effort="none").text == f"hi;{ON}"
    assert render(mode, thinking_mode="chat", effort="high").thinking_disabled
    both = "{{ enable_thinking }},{{ thinking }}"
    assert render(both, thinking=False).text == "False,False"
    assert render(both, thinking=True, enable_thinking=False).text == "False,True"
    assert render(both).text == ","
    assert render("{{ thinking_budget }}" + THINKS["thinking_budget"], thinking_budget=512).text == f"512{ON}"


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (("low", "high", "max"), "low low high high max max"),
        (("high", "no_think"), "high high high high high high"),
        (("xhigh", "medium", "low"), "low low medium xhigh xhigh xhigh"),
        (("low", "medium", "high"), "low low medium high high high"),
    ],
)
def test_a_word_of_effort_that_the_template_refuses_is_the_nearest(taken: tuple[str, ...], expected: str) -> None:
    """Oracle: by hand; lists of words of real templates, which raise for any other."""
    for name in ("reasoning_effort", "thinking_effort"):
        source = (
            f"{{% if {name} is defined and {name} not in {list(taken)} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
            f"{{{{ {name} }}}}"
        )
        words = ("minimal", "low", "medium", "high", "xhigh", "max")
        assert " ".join(render(source, effort=word).text for word in words) == expected
        assert render(source, effort="none").text == ("no_think" if "no_think" in taken else "")


def test_a_template_that_prints_the_effort_has_no_word_for_off() -> None:
    """Oracle: gpt-oss, which takes any word: it gets the client's."""
    source = "Reasoning: {{ reasoning_effort | default('medium') }}"
    assert [render(source, effort=word).text[11:] for word in ("none", "low", "odd")] == ["none", "low", "odd"]
    assert render(source, enable_thinking=False).text == "Reasoning: medium"
    known = "{{ 'High' if reasoning_effort == 'high' else 'Max' }}{{ '' if enable_thinking is false else '<think>' }}"
    assert render(known, enable_thinking=False).text == "Max"
