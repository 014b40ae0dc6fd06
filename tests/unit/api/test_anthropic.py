"""From Messages bodies to chats: system prompts, blocks, tools, thinking."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tp_engine.api.anthropic.messages import chat_messages
from tp_engine.api.anthropic.protocol import Message, MessagesBody
from tp_engine.api.anthropic.requests import chat_body
from tp_engine.errors import RequestError


def chat(messages: list[Any], **fields: Any) -> Any:
    return chat_body(MessagesBody.model_validate({"messages": messages, "max_tokens": 9, **fields}))


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", **fields}


USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be kind", "be kind"),
        (text("a", "b"), "a\n\nb"),
        (text("x-anthropic-billing-header: cch=12;", "b"), "b"),
        (text("x-anthropic-billing-header: cch=12;"), None),
        ("", None),
    ],
)
def test_a_system_prompt_is_the_first_message(system: Any, expected: str | None) -> None:
    """Oracle: the texts of its blocks, without the one that changes with each request."""
    first, *rest = chat([user("hi")], system=system).messages
    assert (first["content"] if first["role"] == "system" else None) == expected
    assert (rest or [first])[-1] == user(text("hi"))


def test_a_long_text_is_not_looked_at_letter_by_letter() -> None:
    """Oracle: a text that cannot be iterated over; tools come and go in blocks alone."""

    class Text(str):
        def __iter__(self) -> Any:
            raise AssertionError("letter by letter")

    body = MessagesBody.model_validate({"messages": [user("hi")], "max_tokens": 9})
    body.messages[0].content = Text("hi")
    assert chat_body(body).messages == [user(text("hi"))]


def test_a_system_message_behind_the_first_turn_stays_in_its_place() -> None:
    """Oracle: the prompt before it does not change, so a cached prefix is found; it joins the user's text."""
    system = {"role": "system", "content": "3 tokens left"}
    assert chat([system, user("a")]).messages == [{"role": "system", "content": "3 tokens left"}, user(text("a"))]
    assert chat([user("a"), system]).messages == [user(text("a", "3 tokens left"))]
    turns = [user("a"), {"role": "assistant", "content": [USE]}, user([result(content="7")]), system, user("b")]
    assert chat(turns).messages[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        user(text("3 tokens left", "b")),
    ]


def test_the_blocks_of_an_assistant() -> None:
    """Oracle: the fields of a chat's message; what only Anthropic's servers can read is left out."""
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        *text("I look."),
        USE,
        {**USE, "id": "c2", "input": {}},
    ]
    message = chat([user("a"), {"role": "assistant", "content": content}, user([result()])]).messages[1]
    second = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message == {
        "role": "assistant", "content": text("I look."), "reasoning_content": "hm", "tool_calls": [CALLED, second],
    }  # fmt: skip


def test_a_call_whose_input_is_the_text_of_an_object() -> None:
    """Oracle: the call with the object; gateways to OpenAI's API send the arguments on as they came."""
    as_text = {**USE, "input": json.dumps(USE["input"])}
    calls = [
        chat([user("a"), {"role": "assistant", "content": [one]}, user([result()])]).messages[1]["tool_calls"]
        for one in (USE, as_text)
    ]
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("sun", "sun"),
        (None, ""),
        ([], "[the tool failed]"),
        (text("a", "b"), "a\nb"),
        ([{"type": "image", "source": {}}, *text("b")], "[image omitted]\nb"),
        ([{"type": "search_result", "title": "T", "source": "http://x", "content": text("c")}], "T\nhttp://x\nc"),
        ([{"type": "tool_reference", "tool_name": "f"}], "f"),
        ([{"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}], "T\nd"),
        ([{"type": "document", "source": {"type": "base64", "data": "d"}}], "[document omitted]"),
    ],
)
def test_the_answer_of_a_tool_is_text(content: Any, expected: str) -> None:
    """Oracle: the texts joined with line ends; a note for what is no text, so that the conversation goes on."""
    answer = result() if content is None else result(content=content, is_error=True)
    messages = chat(
        [user("a"), {"role": "assistant", "content": [USE]}, user([*text("first"), answer, *text("b")])]
    ).messages
    assert messages[2:] == [
        user(text("first")),
        {"role": "tool", "tool_call_id": "c1", "content": expected},
        user(text("b")),
    ]


def test_tools_are_functions() -> None:
    """Oracle: a chat's tools; those that Anthropic's servers run are left out."""
    tools = [
        {"name": "f", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}, "strict": True},
        {"type": "custom", "name": "g", "description": "d", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    made = chat([user("a")], tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [one["function"] for one in made.tools] == [
        {"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True},
        {"name": "g", "description": "d", "parameters": {"type": "object"}},
    ]
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", False)
    assert chat([user("a")], tools=tools[2:], tool_choice={"type": "auto"}).tools is None


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, None, None),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, None, True),
        ({"thinking": {"type": "between_tools"}}, None, None),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, True),
        ({"output_config": {"effort": "xhigh"}}, "high", None),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "low", False),
        ({"reasoning_effort": "none"}, "none", None),
    ],
)
def test_thinking_is_switched_as_a_chat_switches_it(fields: Any, effort: str | None, thinks: bool | None) -> None:
    """Oracle: the chat's own fields."""
    made = chat([user("a")], **fields)
    assert (made.effort, made.thinks) == (effort, thinks)


def test_a_function_without_a_name_is_refused_by_its_place() -> None:
    """Oracle: the place of the fault in the client's own body."""
    with pytest.raises(RequestError, match=r"tools\[1\].name is missing"):
        chat([user("a")], tools=[{"name": "f"}, {"input_schema": {}}])
    with pytest.raises(RequestError, match=r"tools\[0\] has parameters; here their name is input_schema"):
        chat([user("a")], tools=[{"name": "f", "parameters": {"type": "object"}}])
    with pytest.raises(RequestError, match=r"tools\[0\] is a function in OpenAI's form"):
        chat([user("a")], tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user([{"type": "image", "source": {}}])], "messages[0].content[0] is a block of type 'image'"),
        ([user([{"type": "text"}])], "messages[0].content[0].text is None"),
        ([user([{"no": "type"}])], "messages[0].content[0].type is None"),
        ([user([{"type": "tool_result"}])], "tool_use_id"),
        ([user([result(content=[7])])], "content must be text, or a list of blocks"),
        ([user([result(content=7)])], "content must be text, or a list of blocks"),
        ([user([{"type": "redacted_thinking"}])], "nothing that the model can read"),
        ([user("a"), {"role": "assistant", "content": [USE]}], "send the tool_result"),
        ([user("a"), {"role": "assistant", "content": []}], "assistant"),
    ],
)
def test_what_is_refused_by_name(messages: list[Any], words: str) -> None:
    """Oracle: the place of the fault in the client's own body."""
    with pytest.raises(RequestError) as raised:
        chat(messages)
    assert words in str(raised.value) and raised.value.param == "messages"


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def test_messages_change_the_list_of_tools() -> None:
    """Oracle: the tools that are offered behind the last message, in their order; the blocks themselves are no text."""
    tools = [{"name": name, "input_schema": {}} for name in "fg"]
    definition = {"name": "h", "description": "new", "input_schema": {"properties": {}}}
    remove, add = (change(kind, type="tool_reference", name="f") for kind in ("removal", "addition"))
    define = change("addition", type="tool_definition", definition=definition)
    other = change("addition", type="mcp_tool_reference", name="x", server_name="y")
    for changes, names in (
        ([], "fg"), ([remove], "g"), ([remove, add], "gf"), ([define], "fgh"), ([other], "fg"),
        ([define, change("removal", type="tool_reference", name="h")], "fg"),
    ):  # fmt: skip
        found = chat([user("a"), *changes, user("b")], tools=tools)
        assert [tool["function"]["name"] for tool in found.tools] == [*names]
        assert found.messages == [user(text("a", "b"))]
    assert chat([user("a"), define]).tools[0]["function"]["description"] == "new"
    assert chat([user("a"), remove], tools=tools[:1], tool_choice={"type": "auto"}).tools is None


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (None, r"messages\[1\].content\[0\].tool is None"),
        ({"type": "tool_definition", "definition": {"name": 3}}, r"tool.definition: .*name"),
    ],
)
def test_a_change_of_tools_that_can_not_be_read_is_named(tool: Any, words: str) -> None:
    """Oracle: the place of the block."""
    with pytest.raises(RequestError, match=words):
        chat([user("a"), {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}])


def test_a_system_message_may_end_with_the_next_turn() -> None:
    """Oracle: it is shown while no later message is the user's; one without a content says nothing."""
    system = {"role": "system", "content": "3 tokens left", "clear_at": "next_user_message"}
    assert chat([user("a"), system]).messages == [user(text("a", "3 tokens left"))]
    assert chat([user("a"), system, user("b")]).messages == [user(text("a", "b"))]
    assert chat([user("a"), {"role": "system", "output_config": {"effort": "low"}}]).messages == [user(text("a"))]
    with pytest.raises(RequestError, match=r"messages\[0\].content is missing"):
        chat([{"role": "user"}])


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("compaction", "W"),
        ("mcp_tool_result", "W"),
        ("mcp_tool_result", [{"type": "text", "text": "W"}]),
        ("bash_code_execution_tool_result", {"type": "r", "stdout": "W", "stderr": "", "content": []}),
        ("code_execution_tool_result", {"type": "code_execution_result", "stdout": "", "stderr": "W", "content": []}),
        ("text_editor_code_execution_tool_result", {"type": "view_result", "content": "W"}),
        ("web_fetch_tool_result", {"content": {"type": "document", "source": {"type": "text", "data": "W"}}}),
    ],
)
def test_what_a_servers_own_tool_found_is_the_assistants(kind: str, content: Any) -> None:
    """Oracle: the text is there, as the assistant's; Anthropic's API shows its model all of these."""
    blocks = [{"type": kind, "content": content}, *text("Ok.")]
    messages = chat([user("a"), {"role": "assistant", "content": blocks}, user("b")]).messages
    assert messages[1]["content"] == text("W", "Ok.")
    images = chat_messages(None, [Message.model_validate({"role": "assistant", "content": blocks})], takes_images=True)
    assert images == [{"role": "assistant", "content": text("W", "Ok.")}]


def test_a_pdf_that_a_servers_tool_fetched_is_no_text() -> None:
    """Oracle: bytes in base64 tell the model nothing."""
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "W"}}
    blocks = [{"type": "web_fetch_tool_result", "content": {"content": pdf}}, *text("Ok.")]
    assert chat([user("a"), {"role": "assistant", "content": blocks}]).messages[1]["content"] == text("Ok.")


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_that_failed_and_says_nothing(content: Any) -> None:
    """Oracle: it does not look like one that had nothing to say."""
    answer = {"type": "tool_result", "tool_use_id": "t", "content": content}
    told = [
        chat_messages(None, [Message.model_validate({"role": "user", "content": [{**answer, "is_error": is_error}]})])
        for is_error in (True, False)
    ]
    assert [one[0]["content"] for one in told] == ["[the tool failed]", ""]


def test_blocks_of_tools_that_anthropics_servers_run_are_left_out() -> None:
    """Oracle: the kinds that Anthropic's SDK has for messages of the assistant."""
    kinds = ["advisor_tool_result", "mcp_tool_listing", "web_search_tool_result", "server_tool_use", "compaction"]
    content = [*({"type": kind} for kind in kinds), *text("Ok.")]
    assert chat([user("a"), {"role": "assistant", "content": content}, user("b")]).messages[1]["content"] == text("Ok.")
