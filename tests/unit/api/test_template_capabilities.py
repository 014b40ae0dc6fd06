"""What a template takes: contents as text or as parts, by role, and calls.  The shapes are those of real templates."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chat_templates import BRANCHES, LLAMA_LIKE, PARTS, QWEN_LIKE
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.chat import capabilities as capabilities_module
from tp_engine.api.openai.chat.capabilities import ContentForm, TemplateCapabilities
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.chat.template import ChatTemplate
from tp_engine.errors import RequestError

FORMS = {
    "text": ContentForm(takes_text=True, takes_parts=False),
    "both": ContentForm(takes_text=True, takes_parts=True),
    "parts": ContentForm(takes_text=False, takes_parts=True),
    "part": ContentForm(takes_text=False, takes_parts=False),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = [{"id": f"call_{n}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for n in (1, 2)]
RESULTS = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n} <b>"} for n in (1, 2)]
USER, SYSTEM = {"role": "user", "content": " Hi <you> "}, {"role": "system", "content": "Be brief."}
TEXTS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Hello"}, USER],
    "calls": [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS],
    "an empty text": [USER, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, RESULTS[0], USER],
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def probed(source: str) -> TemplateCapabilities:
    return TemplateCapabilities.of(ChatTemplate(source), {"bos_token": "<s>"})


def render(source: str, messages: Any, content_format: str = "auto", **options: Any) -> str:
    chosen = ChatOptions(chat_template=source, chat_template_content_format=content_format)
    return ChatFormat(byte_level_tokenizer(), chosen).render(messages, options).text


def transformers_text(source: str, messages: Any, **options: Any) -> str | None:
    """What transformers renders of the same messages, null contents empty and tools named; None if it refuses."""
    given = [{**one, "content": one["content"] or ""} for one in messages]
    given = [one | ({"name": "f"} if one["role"] == "tool" else {}) for one in given]
    try:
        found: str = byte_level_tokenizer().apply_chat_template(
            given, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )
    except Exception:
        return None
    return found


@pytest.mark.parametrize("shape", BRANCHES)
def test_each_role_has_its_form(shape: str) -> None:
    """Oracle: the table of shapes, by hand."""
    source, expected = BRANCHES[shape]
    found = probed(source)
    for role, form in zip(("user", "assistant", "system"), expected, strict=True):
        assert found.form(role) == FORMS[form], role
    assert found.form("tool") == FORMS["text"] and found.form("critic") == found.form("user")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("conversation", TEXTS)
@pytest.mark.parametrize("shape", BRANCHES)
def test_texts_are_what_transformers_renders(shape: str, conversation: str, tools: Any) -> None:
    """Oracle: transformers, with the contents as the client sent them; a list where the template takes lists only."""
    source, forms = BRANCHES[shape]
    messages = TEXTS[conversation]
    sent = messages
    if forms[0] in ("parts", "part"):
        sent = [one | ({"content": parts(one["content"])} if one["role"] == "user" else {}) for one in messages]
    expected = transformers_text(source, sent, tools=tools)
    if expected is None:
        with pytest.raises(RequestError, match="refuses"):
            render(source, messages, tools=tools)
    else:
        assert render(source, messages, tools=tools) == expected


@pytest.mark.parametrize("shape", BRANCHES)
def test_no_part_is_lost_or_printed_as_a_list(shape: str) -> None:
    """Oracle: every text of every role shows, without the keys of a part."""
    source, _ = BRANCHES[shape]
    both, calling = {"content": parts("one", "two")}, {"role": "assistant", "tool_calls": CALLS[:1]}
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "system", **both}, USER],
        [{"role": "user", **both}],
        [USER, {"role": "assistant", "content": "a"}, {"role": "user", **both}],
        [USER, {"role": "assistant", **both}, USER],
        [USER, {**calling, **both}, RESULTS[0], USER],
        [USER, {**calling, "content": parts("")}, {"role": "tool", "tool_call_id": "call_1", **both}, USER],
    ]
    for messages in conversations:
        for tools in (None, TOOLS):
            try:
                shown = render(source, messages, tools=tools)
            except RequestError as error:
                assert messages[0]["role"] == "system" and "no system" in str(error)
                continue
            assert "one" in shown and "two" in shown and "'text'" not in shown and '"text"' not in shown, shown


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<system>x"),
        ("{# developer #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<developer>x"),
        ("{% for m in messages %}{% if m.role == 'developer' %}[{{ m.content }}]{% endif %}{% endfor %}", "[x]"),
        (
            "developer:{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('who?') }}"
            "{% endif %}{{ m.content }}{% endfor %}",
            "developer:x",
        ),
        (
            "developer:{% for m in messages if m.role != 'developer' %}{{ m.role }}:{{ m.content }}{% endfor %}",
            "developer:system:x",
        ),
    ],
)
def test_a_developer_is_heard(source: str, expected: str) -> None:
    """Oracle: by hand: a mark named after the role does not mean that a template takes its messages."""
    assert render(source, [{"role": "developer", "content": "x"}]) == expected


SHOWN = "{{ m.role }}:{{ m.content }};"
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% set messages = messages[1:] %}{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' and not "
    "m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% elif m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}" + SHOWN + "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{{% for m in messages %}}{SHOWN}{{% endfor %}}", "system:A;system:B;user:1;user:2;assistant:a;system:C;"),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system "
            f"message must be first') }}}}{{% endif %}}{SHOWN}{{% endfor %}}",
            "system:A\n\nB;user:1;user:2;assistant:a;user:C;",
        ),
        (
            f"{{% for m in messages %}}{{% if m.role != 'system' or loop.first %}}{SHOWN}{{% endif %}}{{% endfor %}}",
            "system:A\n\nB;user:1;user:2;assistant:a;user:C;",
        ),
        (
            "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}"
            f"{{% endfor %}}{{{{ ns.s }}}};{{% for m in messages if m.role != 'system' %}}{SHOWN}{{% endfor %}}",
            "A\n\nB;user:1;user:2;assistant:a;user:C;",
        ),
        (ALTERNATING, "A\n\nB;user:1\n\n2;assistant:a;user:C;"),
    ],
    ids=["any place", "refused", "dropped", "the last one wins", "alternating"],
)
def test_no_message_of_an_agent_is_lost(source: str, expected: str) -> None:
    """Oracle: by hand: agents send several system messages, later ones too, and two of the user in a row."""
    texts = [("system", "A"), ("system", "B"), ("user", "1"), ("user", "2"), ("assistant", "a"), ("system", "C")]
    assert render(source, [{"role": role, "content": text} for role, text in texts]) == expected


def test_what_the_user_says_to_a_tools_answer_is_not_lost() -> None:
    """Oracle: by hand, for a template that wants the assistant behind a tool's answer; parts stay parts."""
    calling = {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}
    shown = render(ALTERNATING, [USER, calling, RESULTS[0], {"role": "user", "content": parts("and", "this")}])
    assert shown == "user: Hi <you> ;assistant:;tool:1 <b>\nand\nthis;"


@pytest.mark.parametrize("content", ["hello", parts("hello")], ids=["text", "parts"])
def test_many_messages_in_a_row_are_joined_in_linear_time(content: Any) -> None:
    """Oracle: by hand.  A stranger's body holds so many; joined one by one they took half a minute and more."""
    began_s = time.thread_time()
    shown = render(ALTERNATING, [{"role": "user", "content": content}] * 100_000)
    assert shown.count("hello") == 100_000
    assert time.thread_time() - began_s < 10


def test_parts_stay_parts_where_they_are_taken() -> None:
    """Oracle: by hand: a template that writes each part on its own, and one that takes texts only."""
    messages = [{"role": "user", "content": parts("a", "b")}]
    assert render(PARTS, messages) == "user:<a><b>"
    assert render(LLAMA_LIKE, messages).endswith("a\nb<|eot|><|h|>assistant<|/h|>")


@pytest.mark.parametrize(
    ("content_format", "content", "expected"),
    [
        ("string", parts("a", "b"), "'a\\nb'"),
        ("string", "a", "'a'"),
        ("openai", parts("a", "b"), "[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]"),
        ("openai", "a", "[{'type': 'text', 'text': 'a'}]"),
        ("auto", parts("a", "b"), "'a\\nb'"),
    ],
)
def test_the_option_decides_for_all_roles_but_tools(content_format: str, content: Any, expected: str) -> None:
    """Oracle: by hand: Python's spelling of what the template got; a tool's answer is text."""
    source = "{% for m in messages %}{{ m.role }}={{ ([m.content] | string)[1:-1] }};{% endfor %}"
    messages = [{"role": role, "content": content} for role in ("system", "user", "assistant")]
    answer = {"role": "tool", "content": parts("c", "d")}
    shown = render(source, [*messages, answer], content_format, add_generation_prompt=False)
    assert shown == "".join(f"{role}={expected};" for role in ("system", "user", "assistant")) + "tool='c\\nd';"


OBJECT, TEXT = "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
REPR = "{{ call.function.arguments }}"


def calling(arguments: str, message: str = "{{ m.content }}", condition: str = "true") -> str:
    """A template that shows calls by the Jinja text ``arguments``, if the ``condition`` holds, and contents."""
    return (
        f"{{% for m in messages %}}{message}{{% if m.tool_calls and {condition} %}}"
        f"{{% for call in m.tool_calls %}}[{arguments}]{{% endfor %}}{{% endif %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (calling(OBJECT), '{"a":1}', '[{"a": 1}]'),
        (calling(TEXT), '{"a":1}', '[{"a":1}]'),
        (calling(REPR), '{"a":1}', '[{"a":1}]'),
        (calling("{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"), '{"a":1}', "[a=1]"),
        (calling(TEXT), {"a": "ü"}, '[{"a": "ü"}]'),
        (calling(TEXT, condition="m.content is none", message=""), '{"a":1}', '[{"a":1}]'),
        (calling(OBJECT, condition="m.content is none", message=""), '{"a":1}', '[{"a": 1}]'),
        (QWEN_LIKE, '{"a":1}', '"arguments": {"a": 1}}'),
    ],
)
def test_calls_show_their_arguments_as_json(source: str, arguments: Any, expected: str) -> None:
    """Oracle: by hand: JSON, never Python's spelling; as the client's text where the template takes no object."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    shown = render(source, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], tools=TOOLS)
    assert expected in shown and "None" not in shown


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "{{ messages[0].nothing.more }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ namespace(__class__=1) }}",
        "{{ tools[0].function.name }}",
        "{% if false %}{% endif %}",
    ],
)
def test_probes_never_fail_a_start(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: texts stay texts, whatever the template does."""
    monkeypatch.setattr(capabilities_module, "MAX_PROBES_S", 0.5)
    chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=source))
    chat.prepare()
    assert probed(source).form("user") == FORMS["text"]


@pytest.mark.parametrize(
    "body",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set x = m(n - 1) + m(n - 1) %}{% endif %}{% endmacro %}{{ m(200) }}",
    ],
)
def test_probes_are_bounded(body: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a template that works for ever and writes nothing ends at the deadline, which the log says."""
    monkeypatch.setattr(capabilities_module, "MAX_PROBES_S", 0.05)
    started_s = time.monotonic()
    assert probed(body + "{{ messages[0].content }}").form("user") == FORMS["text"]
    assert time.monotonic() - started_s < 5 and "could not be probed" in caplog.text


LFM2_LIKE = """{% if tools %}List of tools: [{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}
{%- for message in messages %}|{{ message.role }}:{{ message.content }}{% endfor %}"""
GRANITE_LIKE = (
    """{# <|tool_call|> #}{% for message in messages %}|{{ message.role }}:{{ message.content }}{% endfor %}"""
)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (LFM2_LIKE, "<|tool_call_start|>[f(a=1), f(a=1)]<|tool_call_end|>"),
        (GRANITE_LIKE, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]'),
        (QWEN_LIKE, None),
        ("{% for message in messages %}|{{ message.role }}:{{ message.content }}{% endfor %}", ""),
    ],
)
def test_calls_that_a_template_does_not_show_are_written_into_the_content(source: str, written: str | None) -> None:
    """Oracle: the spelling of the model; nothing is added where the template shows calls, where the format is not
    known, and for callers that give messages as the template wants them."""
    chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=source))
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "I look. ", "tool_calls": CALLS}, *RESULTS]
    plain, shown = chat.render(messages).text, chat.render(messages, adapts_calls=True).text
    assert shown == (plain if written is None else plain.replace("I look. ", f"I look. {written}"))
    alone: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS]
    assert (written or "") in chat.render(alone, adapts_calls=True).text


@pytest.mark.parametrize(("source", "is_told"), [(LFM2_LIKE, True), (QWEN_LIKE, True), (GRANITE_LIKE, False)])
def test_a_template_that_does_not_tell_of_tools_is_named(
    source: str, is_told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a warning with the remedy, for requests with tools only."""
    monkeypatch.setattr("tp_engine.system.log._said", set())
    assert probed(source).shows_tools is is_told
    chat = ChatFormat(byte_level_tokenizer(), ChatOptions(chat_template=source))
    chat.render([USER])
    assert "does not tell the model" not in caplog.text
    chat.render([USER], {"tools": TOOLS})
    assert ("does not tell the model" in caplog.text) is not is_told
