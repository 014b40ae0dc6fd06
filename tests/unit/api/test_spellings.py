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
    chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=template))
    return chat.render(list(messages), {}).text


@pytest.mark.parametrize(
    "spelt",
    [
        {"reasoning_content": "PLAN"},
        {"reasoning": "PLAN"},
        {"thinking": "PLAN"},
        {"reasoning_text": "PLAN", "reasoning_opaque": "gAAA"},
        {"tool_plan": "PLAN"},
        {"provider_specific_fields": {"reasoning_content": "PLAN", "refusal": None, "citations": []}},
        {"reasoning_content": "PLAN", "provider_specific_fields": {"reasoning_content": "OTHER"}},
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
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert shown(ASK, refused, NEXT) == shown(ASK, {"role": "assistant", "content": "I cannot."}, NEXT)
    assert in_one_spelling("", {**refused, "content": "but"})["content"] == "but"


def test_a_tool_that_had_nothing_to_say() -> None:
    """Oracle: the prompt of an empty text, as in vLLM; a message without the field stays malformed."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call]}
    answer: dict[str, Any] = {"role": "tool", "tool_call_id": "c"}
    assert shown(ASK, calling, {**answer, "content": None}) == shown(ASK, calling, {**answer, "content": ""})
    with pytest.raises(RequestError, match=r"messages\[2\] has no content"):
        shown(ASK, calling, answer)


PLAIN = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(
            ("refusal", "annotations", "audio", "function_call", "tool_calls")
        ),  # as OpenAI's library dumps it
        {"prefix": True},  # of a message that is not the last one
        {"prefix": False, "partial": False},
        *({name: "x"} for name in sorted(spellings.UNTOLD)),
    ],
    ids=str,
)
def test_what_tells_the_model_nothing(fields: dict[str, Any]) -> None:
    """Oracle: the prompt without the fields."""
    assert shown(ASK, PLAIN | fields, NEXT) == shown(ASK, PLAIN, NEXT)


def test_what_was_spoken_is_content() -> None:
    """Oracle: the transcript as content; an audio that only its server has is refused by name."""
    audio = {"id": "audio_1", "data": "AAA", "transcript": "spoken"}
    spoken = {"role": "assistant", "content": None, "audio": audio}
    assert shown(ASK, spoken, NEXT) == shown(ASK, {"role": "assistant", "content": "spoken"}, NEXT)
    with pytest.raises(RequestError, match=r"messages\[1\]\.audio is .*audio_1.*; this server keeps no audio"):
        shown(ASK, {**spoken, "audio": {"id": "audio_1"}}, NEXT)


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ({"images": [{"type": "image_url"}]}, "messages[1].images"),
        ({"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}, "messages[1].content[0]"),
        ({"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}, "messages[1].tool_calls[0]"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(answer: dict[str, Any], place: str) -> None:
    """Oracle: the field's place in the messages."""
    with pytest.raises(RequestError) as caught:
        shown(ASK, PLAIN | answer, NEXT)
    assert place in str(caught.value)


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_that_asks_to_be_continued(name: str) -> None:
    """Oracle: refused with the remedy, which works."""
    chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=SHOWS_THINKING))
    messages: list[dict[str, Any]] = [ASK, {**PLAIN, name: True}]
    with pytest.raises(RequestError, match=f"has {name} True; .* continue_final_message to true"):
        chat.render(messages)
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat.render(messages, asked).continued == "A"


def test_the_log_names_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; fields that say nothing are not named."""
    told: list[str] = []
    monkeypatch.setattr(spellings, "warn_once", lambda _logger, text, *values: told.append(text % values))
    shown(ASK, {**PLAIN, "mood": "merry", "empty": None, "nothing": []}, NEXT)
    assert told == ["messages have the field 'mood', which only a template that knows it reads"]
