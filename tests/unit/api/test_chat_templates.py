"""From messages to a prompt: transformers renders the same, and templates that would run without bound are stopped."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import LLAMA_LIKE, QWEN_LIKE
from tests.text_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer
from tp_engine.api.openai.chat import template as template_module
from tp_engine.api.openai.chat.options import TOOL_ALIASES, ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.chat.template import ChatTemplate, TemplateRefusal
from tp_engine.api.openai.reasoning import REASONING_ALIASES, REASONING_FORMATS
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
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


def test_documents_are_shown_or_refused() -> None:
    """Oracle: a template that does not name them cannot show them, and nothing that was sent is lost silently."""
    documents = [{"title": "T", "text": "W"}]
    reading = CHAT_TEMPLATE + "{% for one in documents or [] %}{{ one.text }}{% endfor %}"
    assert render([QUESTION], reading, documents=documents).endswith("W")
    with pytest.raises(RequestError, match="shows the model no documents") as error:
        render([QUESTION], CHAT_TEMPLATE, documents=documents)
    assert error.value.param == "documents"
    assert render([QUESTION], CHAT_TEMPLATE, documents=[]) == render([QUESTION], CHAT_TEMPLATE)


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


BAD_ARGUMENTS = ['{"a": "cut', "{", "null", "[1]", '"x"', "5", "hello", " ", "", None, 5, [1], True, "[" * 5000]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_arguments_that_are_no_object_stay_visible(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: an empty object for what means nothing, else an object with the text, and a warning; the client's text
    where a template takes texts."""
    function = {"name": "fn\n", "arguments": arguments}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.arguments | tojson }}]{% endfor %}"
    means_nothing = arguments in ("null", " ", "", None)
    given = {} if means_nothing else {"INVALID_JSON": arguments}
    assert render([QUESTION, calls, QUESTION], source + "{% endfor %}") == f"[{json.dumps(given)}]"
    assert ("function 'fn\\n'" in caplog.text) is not means_nothing and len(caplog.text) < 500
    assert function["arguments"] == arguments, "the body is not changed"
    texts = source.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    is_text = isinstance(arguments, str) and arguments.strip()
    shown = render([QUESTION, calls, QUESTION], texts + "{% endfor %}")
    assert shown == (f"[{arguments}]" if is_text else "[{}]")


def test_arguments_of_a_million_parts_are_refused_before_they_are_read() -> None:
    """Oracle: the number, of all calls together; half of them are taken.  Reading five million took all threads two
    seconds, and the limit of a body counts nothing inside of texts."""
    function = {"name": "f", "arguments": '{"a": [' + "1," * 500_000 + "1]}"}
    calls = {"role": "assistant", "tool_calls": [{"function": function}]}
    source = "{{ messages | length }}"
    assert render([QUESTION, calls, QUESTION], source) == "3"
    with pytest.raises(RequestError, match=r"have 1,000,004 commas and brackets; at most 1,000,000 are allowed"):
        render([QUESTION, calls, calls, QUESTION], source)


def test_arguments_are_valid_unicode() -> None:
    """Oracle: U+FFFD for half a surrogate pair, which a limit may leave; a whole pair is a character."""
    arguments = '{"a\\ud83d": ["\\ud83d\\ude00 \\ud83d"]}'
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert render([QUESTION, calls], source + "{% endfor %}") == '{"a\ufffd": ["😀 \ufffd"]}'


def test_answers_of_tools_are_named_by_their_calls() -> None:
    """Oracle: the function's name, found by the call's id."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.name }};{% endfor %}"
    call = {"role": "assistant", "tool_calls": [CALL]}
    answers = [{"role": "tool", "tool_call_id": name, "content": "2"} for name in ("call_1", "call_2")]
    assert render([QUESTION, call, *answers], source) == "user:;assistant:;tool:add;tool:;"


KNOWN_ROLES = """\
{%- for m in messages %}
    {%- if m.role == 'user' or m.role == 'assistant' %}<{{ m.role }}>{{ m.content | trim }}{% endif %}
    {%- if m.role == 'note' and show %}<note>{{ m.content | upper }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("content", ["said before", [{"type": "text", "text": "said before"}]])
def test_no_role_is_lost_without_a_word(content: Any) -> None:
    """Oracle: the text is in the prompt, or the role is named; a template that knows a role may hide it."""
    message = {"role": "model", "content": content}
    with pytest.raises(RequestError, match="has the role 'model', which the chat template passes over"):
        render([QUESTION, message, QUESTION], KNOWN_ROLES)
    assert "said before" in render([QUESTION, message, QUESTION], QWEN_LIKE)
    assert "said" not in render([QUESTION, {"role": "note", "content": content}], KNOWN_ROLES)
    assert "SAID BEFORE" in render([QUESTION, {"role": "note", "content": content}], KNOWN_ROLES, show=True)
    many = [{"role": f"role{number}", "content": "x"} for number in range(100)]
    with pytest.raises(RequestError, match="100 other roles"):
        render([QUESTION, *many], QWEN_LIKE)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'; only text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "user", "content": ["a", {"type": "text"}]}, r"\[1\] is a part of type 'text', but has no text"),
        ({"role": "user", "content": ["a", 5]}, r"content\[1\] is a part of type 'int'; only text"),
        ({"role": "tool"}, r"messages\[0\] has no content"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, r"tool_calls\[0\] must be"),
        ({"role": [1] * 99_999, "content": "x"}, r"messages\[0\].role is \[1, 1"),
        (["x" * 99_999], r"messages\[0\] is \['xx"),
    ],
)
def test_malformed_messages_are_refused_by_name(message: Any, words: str) -> None:
    """Oracle: the place and the rule, in a few words whatever the size of what was sent."""
    with pytest.raises(RequestError, match=words) as caught:
        render([message], QWEN_LIKE)
    assert caught.value.param == "messages" and len(str(caught.value)) < 400


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
        "{% for i in range(1000000000) %}x{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(source: str) -> None:
    """Oracle: only a ``RequestError``, with the template's own words."""
    with pytest.raises(RequestError, match="the chat template refuses these messages: ") as caught:
        render([QUESTION], source)
    assert "only user" in str(caught.value) or "only user" not in source


def test_a_refusal_of_any_length_is_cut() -> None:
    """Oracle: the beginning of the words, which repeat what a client has sent."""
    with pytest.raises(RequestError, match=r"refuses these messages: no x{100}") as caught:
        render([{"role": "user", "content": "x" * 1_000_000}], "{{ raise_exception('no ' + messages[0].content) }}")
    assert len(str(caught.value)) < 5000


def test_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: small bounds: characters of the prompt, and seconds."""
    loop = "{% for i in range(1000) %}{% for j in range(1000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARACTERS", 10_000)
    with pytest.raises(RequestError, match="longer than 10000 characters"):
        render([QUESTION], loop)
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.0)
    with pytest.raises(RequestError, match="takes longer than 0 s"):
        render([QUESTION], loop)


BOMBS = {
    "width of a filter": "{{ ''|center(n)|length }}",
    "width of a format": "{{ ('%' ~ n ~ 'd') % 1 }}",
    "width of a call": "{{ ('{:>' ~ n ~ '}').format(1)|length }}",
    "indent": "{{ [[1]]|tojson(indent=n)|length }}",
    "product": "{{ ('a' * n)|length }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "nesting": "{% set ns = namespace(x=n) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x|tojson }}",
    "replace": "{{ ('a' * (n // 10000))|replace('a', 'b' * (n // 10000))|length }}",
    "list": "{{ ([n] * n)|length }}",
    "time": "{% set ns = namespace(x=n) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_takes_neither_this_process_nor_its_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: this process's own peak, and the next rendering; the words name the bound."""
    monkeypatch.setattr(template_module, "_LIMITS", replace(template_module._LIMITS, memory_bytes=128 << 20))
    monkeypatch.setattr(template_module, "MAX_RENDER_S", 0.1)
    monkeypatch.setattr(template_module, "_DIES_LATER_S", 0.1)
    template = ChatTemplate("{% if bomb %}" + BOMBS[name] + "{% endif %}fine")
    assert template.render({}) == "fine"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateRefusal, match=r"takes (longer|more) than|needs more than 128 MiB"):
        template.render({"bomb": True, "n": 1_000_000_000})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert template.render({}) == "fine"


@pytest.mark.parametrize("source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ " + "1+" * 20_000 + "1 }}"])
def test_a_text_that_is_nested_too_deeply_is_no_template(source: str) -> None:
    """Oracle: ``ConfigError``, for parsers that recur into brackets and for walks over what they made."""
    with pytest.raises(ConfigError, match="nested too deeply"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"), [(" " * (1 << 20) + "x", "1,048,577 characters"), ("{{ " + "1" * 9999 + " }}", "4300 digits")]
)
def test_a_text_that_costs_too_much_is_no_template(source: str, words: str) -> None:
    """Oracle: ``ConfigError`` for a text that takes long to read, and for a number that Python does not."""
    with pytest.raises(ConfigError, match=f"the chat template has .*{words}"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ 3 ** 9 }}", "{{ lipsum(n=9) }}", "{{ 1|nothing }}", "{{ 1 is nothing }}"])
def test_what_no_template_may_use_is_an_error_of_its_text(source: str) -> None:
    """Oracle: ``ConfigError`` with the line, before anything is compiled: constants are folded by then."""
    words = r"^the chat template has an error in line 1: (\S+ is not allowed|No (filter|test) named 'nothing')"
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(source)


def test_a_process_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the next prompt, after the process was old, and after it was killed."""
    template = ChatTemplate("{{ a }}")
    assert template.render({"a": 1}) == "1"
    ends: list[Callable[[], None]] = [
        lambda: template._idle[0]._link.send_bytes(b"null"),  # a job that is none
        template_module._PROCESS.end,
    ]
    for end in ends:
        end()
        with contextlib.suppress(TemplateRefusal, RuntimeError):
            template.render({"a": 2})
        assert template.render({"a": 3}) == "3"


def test_variables_of_python_that_json_does_not_know_are_texts() -> None:
    """Oracle: ``str``; keys that are none, and lists in themselves, are refused."""
    circle: list[Any] = []
    circle.append(circle)
    for wrong in ({(1, 2): 3}, circle):
        with pytest.raises(TemplateRefusal, match="cannot be written as JSON"):
            ChatTemplate("{{ a }}").render({"a": wrong})
    assert ChatTemplate("{{ a }} {{ b[0] }} {{ c }}").render({"a": Path("/x"), "b": (1, 2), "c": "\ud800"}) == (
        "/x 1 \ud800"
    )


def test_options_are_checked(tmp_path: Path) -> None:
    """Oracle: the error's words; a file and its text give the same template."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    for given in (str(path), path.read_text()):
        options = ChatOptions(chat_template=given)
        options.check_chat_options()
        assert ChatFormat(byte_level_tokenizer(), options).render([QUESTION]).text == "1+1?!"
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"chat_template": "/no/such/file"}, "neither a readable file"),
        ({"chat_template": "{% for %}"}, "error in line 1"),
        ({"chat_template_content_format": "xml"}, "choose one of auto, string, openai"),
        ({"tool_call_parser": "nothing"}, "choose one of auto, none, hermes"),
        ({"reasoning_parser": "nothing"}, "choose one of auto, none, qwen3"),
    )
    for fields, words in wrong:
        with pytest.raises(ConfigError, match=words):
            ChatOptions(**fields).check_chat_options()


@pytest.mark.parametrize("name", TOOL_ALIASES)
def test_tool_formats_have_the_names_of_peers(name: str) -> None:
    """Oracle: vLLM's and SGLang's tables of parsers, by hand."""
    options = ChatOptions(tool_call_parser=name, enable_auto_tool_choice=True)
    options.check_chat_options()
    assert options.tool_format("") is TOOL_FORMATS[TOOL_ALIASES[name]]


@pytest.mark.parametrize("name", REASONING_ALIASES)
def test_reasoning_formats_have_the_names_of_peers(name: str) -> None:
    """Oracle: the same."""
    options = ChatOptions(reasoning_parser=name)
    options.check_chat_options()
    assert options.reasoning_format("") is REASONING_FORMATS[REASONING_ALIASES[name]]


def test_several_templates_by_name() -> None:
    """Oracle: ``tool_use`` with tools, otherwise ``default``; a request of the Python API may name one."""

    class Named:
        chat_template = {"default": "plain", "tool_use": "tools"}  # noqa: RUF012

    chat = ChatFormat(Named())
    assert chat.render([QUESTION]).text == "plain"
    assert chat.render([QUESTION], {"tools": TOOLS}).text == "tools"
    assert chat.render([QUESTION], {"chat_template": "tool_use"}).text == "tools"
