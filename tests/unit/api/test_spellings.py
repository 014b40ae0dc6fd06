"""What earlier servers and other libraries wrote into a conversation reaches the template in this API's spelling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_templates import QWEN_LIKE
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.chat import spellings
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.chat.spellings import in_one_spelling
from tp_engine.errors import RequestError

ASK, NEXT = {"role": "user", "content": "Q"}, {"role": "user", "content": "N"}
TEXT = {"type": "text", "text": "A"}
SHOWS_THINKING = """\
{%- for m in messages %}<{{ m.role }}>
    {%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]
    {%- endfor %}
    {%- if m.tool_call_id %}{{ ' of ' + m.tool_call_id + ' ' + m.name }}{% endif %}
{%- endfor %}"""


def shown(*messages: dict[str, Any], template: str = SHOWS_THINKING) -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, ChatOptions()).render(list(messages), {}).text


@pytest.mark.parametrize(
    "spelt",
    [
        {"reasoning_content": "PLAN"},
        {"reasoning": "PLAN"},
        {"thinking": "PLAN"},
        {"reasoning_content": "", "reasoning": None, "thinking": True, "reasoning_details": [], "thinking_blocks": None}
        | {"content": [{"type": "thinking", "thinking": "PLAN"}, TEXT]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "PL"}, {"type": "thinking", "thinking": "AN"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "PLAN", "format": "unknown", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "PLAN"}, {"type": "reasoning.encrypted"}]},
        {"reasoning": "PLAN", "reasoning_details": [{"type": "reasoning.text", "text": "PLAN"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "PLAN"}], "closed": True}, TEXT]},
        {"content": [{"type": "reasoning", "text": "PLAN"}, TEXT]},
        {"content": [{"type": "reasoning", "reasoning": "PLAN"}, TEXT]},
        {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "PLAN"}]}, TEXT]},
        {"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "PLAN"}, TEXT]},
    ],
    ids=str,
)
def test_reasoning_reaches_the_template_once_in_every_spelling(spelt: dict[str, Any]) -> None:
    """Oracle: the prompt of the plain spelling."""
    plain = shown(ASK, {"role": "assistant", "content": "A", "reasoning_content": "PLAN"}, NEXT)
    assert shown(ASK, {"role": "assistant", "content": "A"} | spelt, NEXT) == plain
    assert "(PLAN)A" in plain


def test_reasoning_that_nobody_else_can_read_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the prompt without it, and the words for the log, which have none of its text."""
    told: list[str] = []
    monkeypatch.setattr(spellings, "warn_once", lambda _logger, text, *values: told.append(text % values))
    sealed = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xyz"}, TEXT]}
    assert shown(ASK, sealed, NEXT) == shown(ASK, {"role": "assistant", "content": "A"}, NEXT)
    (words,) = told
    assert "redacted_thinking" in words and "xyz" not in words


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_that_is_not_text_is_refused(field: str) -> None:
    """Oracle: the place and the value; before, it was lost without a word."""
    with pytest.raises(RequestError, match=rf"messages\[1\]\.{field} is .*'x'.*must be text"):
        shown(ASK, {"role": "assistant", "content": "A", field: {"text": "x"}})


@pytest.mark.parametrize("template", [SHOWS_THINKING, QWEN_LIKE], ids=["plain", "qwen"])
def test_a_call_and_its_answer_of_the_time_before_tools(template: str) -> None:
    """Oracle: the prompt of the same call as one of ``tool_calls``; before, both were lost without a word."""
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    old = (
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "weather", "content": "sun"},
    )
    call = {"id": "call_weather", "type": "function", "function": function}
    new = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_weather", "content": "sun"},
    )
    assert shown(ASK, *old, template=template) == shown(ASK, *new, template=template)
    assert "Ulm" in shown(ASK, *old, template=template) and "sun" in shown(ASK, *old, template=template)
    both = {**new[0], "function_call": function}
    assert shown(ASK, both, new[1], template=template) == shown(ASK, *new, template=template)


def test_a_refusal_is_what_the_assistant_said() -> None:
    """Oracle: the same text as the content."""
    refused = {"role": "assistant", "content": None, "refusal": "I can not."}
    assert shown(ASK, refused, NEXT) == shown(ASK, {"role": "assistant", "content": "I can not."}, NEXT)
    assert in_one_spelling("", {**refused, "content": "but"})["content"] == "but"


def test_a_tool_that_had_nothing_to_say() -> None:
    """Oracle: the prompt of an empty text, as in vLLM; a message without the field stays malformed."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call]}
    answer: dict[str, Any] = {"role": "tool", "tool_call_id": "c"}
    assert shown(ASK, calling, {**answer, "content": None}) == shown(ASK, calling, {**answer, "content": ""})
    with pytest.raises(RequestError, match=r"messages\[2\] has no content"):
        shown(ASK, calling, answer)
