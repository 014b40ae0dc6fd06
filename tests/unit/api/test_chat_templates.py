"""From messages to a prompt: transformers renders the same, and templates that would run without bound are stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import LLAMA_LIKE, PARTS, QWEN_LIKE
from tests.text_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer
from tp_engine.api.openai.chat import template as template_module
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.chat.template import ChatTemplate
from tp_engine.errors import ConfigError, RequestError

ADD = {"name": "add", "description": "a & b <c>", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": "ü<", "n": [1]}'}}
QUESTION = {"role": "user", "content": "1+1?"}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
    {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "2"},
]


def render(messages: Any, template: str, **options: Any) -> str:
    return ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=template)).render(messages, options).text


def parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments as objects and texts for null, as transformers expects them."""
    call = CALL | {"function": {"name": "add", "arguments": {"a": "ü<", "n": [1]}}}
    return [
        {**message, "content": message["content"] or "", **({"tool_calls": [call]} if "tool_calls" in message else {})}
        for message in messages
    ]


@pytest.mark.parametrize("template", [QWEN_LIKE, LLAMA_LIKE])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([QUESTION], {}),
        (CONVERSATION, {"tools": TOOLS}),
        (CONVERSATION, {"add_generation_prompt": False}),
        ([QUESTION], {"enable_thinking": False}),
        ([QUESTION, {"role": "assistant", "content": " It is "}], {"continue_final_message": True}),
    ],
)
def test_transformers_renders_the_same(template: str, messages: Any, options: dict[str, Any]) -> None:
    """Oracle: ``apply_chat_template``, with arguments parsed and null contents empty."""
    expected = {"add_generation_prompt": not options.get("continue_final_message", False), **options}
    text = byte_level_tokenizer().apply_chat_template(
        parsed(messages), chat_template=template, tokenize=False, **expected
    )
    assert render(messages, template, **options) == text


def test_continuing_keeps_or_strips_space_as_the_template_does() -> None:
    """Oracle: by hand; the template's end of turn is absent."""
    messages = [QUESTION, {"role": "assistant", "content": "It is "}]
    assert render(messages, CHAT_TEMPLATE, continue_final_message=True).endswith("<s>assistant: It is ")
    stripping = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(messages, stripping, continue_final_message=True) == "[1+1?][It is"
    with pytest.raises(RequestError, match="both true"):
        render(messages, CHAT_TEMPLATE, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not show"):
        render(messages, "{{ messages[0].content }}", continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        (PARTS, "auto", "user:<a><b>"),
        (PARTS, "openai", "user:<a><b>"),
        (CHAT_TEMPLATE, "auto", "<s>user: a\nb</s>"),
        ("{{ messages[0].content | length }}", "openai", "2"),
    ],
)
def test_content_formats(template: str, content_format: str, expected: str) -> None:
    """Parts where the template loops over them, text where it does not. Oracle: by hand."""
    options = ChatOptions(chat_template=template, chat_template_content_format=content_format)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    shown = ChatFormat(byte_level_tokenizer(), options).render(messages, {"add_generation_prompt": False}).text
    assert shown == expected
    if template == PARTS:
        assert ChatFormat(byte_level_tokenizer(), options).render([QUESTION], {}).text == "user:<1+1?>"


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{% for part in message.content %}{% endfor %}", True),
        ("{% for part in messages[0]['content'] %}{% endfor %}", True),
        ("{% set c = message['content'] %}{% for part in c %}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for c in contents %}{{ c.content[0] }}{% endfor %}", False),
        (QWEN_LIKE, False),
    ],
)
def test_content_format_is_read_in_the_template(source: str, takes_parts: bool) -> None:
    """Oracle: whether the template's source loops over a content."""
    assert ChatTemplate(source).takes_parts is takes_parts


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    """Oracle: the role that the template sees."""
    roles = "{% for m in messages %}{{ m.role }} {% endfor %}"
    messages = [{"role": "developer", "content": "x"}]
    assert render(messages, roles) == "system "
    assert render(messages, roles + "{# developer #}") == "developer "


def test_reasoning_is_passed_back_under_both_names() -> None:
    """Oracle: the name that templates read."""
    source = "{{ messages[0].reasoning_content }}"
    for name in ("reasoning", "reasoning_content"):
        assert render([{"role": "assistant", "content": "4", name: "thought"}], source) == "thought"


def test_reasoning_is_the_thinking_of_a_template_that_knows_no_other_name() -> None:
    """Oracle: by hand; the template of gpt-oss refuses a message with content, thinking and calls."""
    source = "{% for message in messages %}{{ message.thinking or '-' }}{% endfor %}"
    thought = {"role": "assistant", "content": "4", "reasoning": "thought"}
    messages = [thought, thought | {"tool_calls": [CALL]}, thought | {"content": None, "tool_calls": [CALL]}]
    assert render(messages, source) == "thought-thought"
    assert render(messages, source + "{# reasoning_content #}") == "---"


def test_arguments_are_text_where_the_template_takes_no_object() -> None:
    """Oracle: by hand, for a template like DeepSeek R1's; the error reports the first refusal."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '[' + c.function.arguments + ']' }}{% endfor %}"
    )
    assert render(CONVERSATION, source + "{% endfor %}") == '[{"a": "ü<", "n": [1]}]'
    with pytest.raises(RequestError, match="object"):
        render(CONVERSATION, source + "{{ raise_exception('an object' if 1 else '') }}{% endfor %}")


def test_answers_of_tools_are_named_by_their_calls() -> None:
    """Oracle: the function's name, found by the call's id."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.name }};{% endfor %}"
    call = {"role": "assistant", "tool_calls": [CALL]}
    answers = [{"role": "tool", "tool_call_id": name, "content": "2"} for name in ("call_1", "call_2")]
    assert render([QUESTION, call, *answers], source) == "user:;assistant:;tool:add;tool:;"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'; only text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "tool"}, r"messages\[0\] has no content"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "is not valid JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "text of an object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "text of an object"),
    ],
)
def test_malformed_messages_are_refused_by_name(message: Any, words: str) -> None:
    """Oracle: the place and the rule."""
    with pytest.raises(RequestError, match=words) as caught:
        render([message], QWEN_LIKE)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user speaks here') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(source: str) -> None:
    """Oracle: only a ``RequestError``, with the template's own words."""
    with pytest.raises(RequestError, match="the chat template refuses these messages: ") as caught:
        render([QUESTION], source)
    assert "only user" in str(caught.value) or "only user" not in source


def test_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: small bounds: characters of the prompt, and seconds."""
    loop = "{% for i in range(1000) %}{% for j in range(1000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARACTERS", 10_000)
    with pytest.raises(RequestError, match="longer than 10000 characters"):
        render([QUESTION], loop)
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.0)
    with pytest.raises(RequestError, match="takes longer than 0 s"):
        render([QUESTION], loop)


def test_options_are_checked(tmp_path: Path) -> None:
    """Oracle: the error's words; a file and its text give the same template."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    for given in (str(path), path.read_text()):
        options = ChatOptions(chat_template=given)
        options.check_chat_options()
        assert ChatFormat(byte_level_tokenizer(), options).render([QUESTION]).text == "1+1?!"
    for fields, words in (
        ({"chat_template": "/no/such/file"}, "neither a readable file"),
        ({"chat_template": "{% for %}"}, "error in line 1"),
        ({"chat_template_content_format": "xml"}, "choose one of auto, string, openai"),
        ({"tool_call_parser": "nothing"}, "choose one of hermes"),
        ({"reasoning_parser": "nothing"}, "choose one of qwen3"),
        ({"enable_auto_tool_choice": True}, "needs tool_call_parser"),
    ):
        with pytest.raises(ConfigError, match=words):
            ChatOptions(**fields).check_chat_options()


def test_several_templates_by_name() -> None:
    """Oracle: ``tool_use`` with tools, otherwise ``default``."""

    class Named:
        chat_template = {"default": "plain", "tool_use": "tools"}  # noqa: RUF012

    chat = ChatFormat(Named())
    assert chat.render([QUESTION]).text == "plain"
    assert chat.render([QUESTION], {"tools": TOOLS}).text == "tools"
