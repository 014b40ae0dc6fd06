"""The Responses API without a server: input items, the resulting chat, and the items and events of answers."""

from __future__ import annotations

import itertools
import json
import logging
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent, ToolParam
from pydantic import TypeAdapter

from tp_engine.api.openai.protocol import parse_body
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.responses_api.client_tools import CLIENT_TOOLS
from tp_engine.api.openai.responses_api.events import ResponseWriter
from tp_engine.api.openai.responses_api.items import input_messages
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import chat_body, prepare_response
from tp_engine.api.openai.responses_api.tools import ResponseTools
from tp_engine.errors import RequestError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def body(**fields: Any) -> ResponsesBody:
    return parse_body(ResponsesBody, json.dumps({"input": "hi"} | fields))


def new_writer(**fields: Any) -> ResponseWriter:
    asked = body(**fields)
    params = SimpleNamespace(temperature=1.0, top_p=0.5)
    shape = SimpleNamespace(response_id="chatcmpl-1", created=1, model="demo")
    chat: Any = SimpleNamespace(shape=shape, requests=[SimpleNamespace(params=params)])
    return ResponseWriter(asked, chat, ResponseTools.of(asked.tools or ()), ReasoningSeal("key"))


def kinds_of(parameter: Any) -> tuple[str, ...]:
    """The values that ``type`` may have in one of the official client's types."""
    kind = get_type_hints(parameter)["type"]
    literals = get_args(kind)
    return literals if get_origin(kind) is Literal else tuple(get_args(literals[0]))


def user(*texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": "user", "content": parts}


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def test_text_and_instructions() -> None:
    """Oracle: the reference; instructions become the system message."""
    assert input_messages("hi", None) == [{"role": "user", "content": "hi"}]
    assert input_messages("hi", "Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_items_of_a_whole_turn_with_tools() -> None:
    """Oracle: the chat that a client of the other endpoint would send."""
    items = [
        {"role": "developer", "content": "Use tools."},
        user("Weather ", "in Oslo?"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [output_text("I look.")]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}},
    ]
    assert input_messages(items, "Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Ask.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]


def test_reasoning_begins_a_message() -> None:
    """Oracle: a turn has reasoning, then text, then calls."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "A"}
    messages = input_messages([thought, said, said, thought, call, thought, said], None)
    shown = [(one.get("reasoning_content"), one["content"], len(one.get("tool_calls", ()))) for one in messages]
    assert shown == [("Hm.", "A", 0), (None, "A", 0), ("Hm.", "", 1), ("Hm.", "A", 0)]


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output", "apply_patch_call_output"])
def test_a_tool_that_had_nothing_to_say(kind: str) -> None:
    """Oracle: the message of an empty text."""
    messages = input_messages([{"type": kind, "call_id": "c", "output": None}], None)
    assert messages == [{"role": "tool", "tool_call_id": "c", "content": ""}]


def test_a_patch_that_failed_and_says_nothing() -> None:
    """Oracle: it does not look like one that was applied."""
    item = {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}
    assert input_messages([item], None)[0]["content"] == "[the tool failed]"
    assert input_messages([{**item, "output": "no such file"}], None)[0]["content"] == "no such file"


@pytest.mark.parametrize("takes_images", [True, False])
@pytest.mark.parametrize(
    "item",
    [
        {"type": "code_interpreter_call", "code": "print()", "outputs": [{"type": "logs", "logs": "W"}]},
        {"type": "file_search_call", "queries": ["q"], "results": [{"filename": "a", "text": "W"}]},
    ],
    ids=lambda item: item["type"],
)
def test_what_a_servers_own_tool_found_is_the_assistants(item: dict[str, Any], takes_images: bool) -> None:
    """Oracle: the text is there, as the assistant's; OpenAI's API shows its model all of these."""
    items = [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]
    messages = input_messages(items, None, takes_images=takes_images)
    assert messages[1] == {"role": "assistant", "content": "W"}


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"output": "W"}, "W"),
        ({"output": ""}, ""),
        ({"output": None, "error": "W"}, "W"),
        ({"error": {"type": "mcp_tool_execution_error"}}, '{"type": "mcp_tool_execution_error"}'),
    ],
)
def test_a_call_of_an_mcp_server_is_a_call_and_its_answer(answer: dict[str, Any], content: str) -> None:
    """Oracle: OpenAI's API, whose model sees what it has asked for and what it got; the same as for a function."""
    mcp = {"type": "mcp_call", "id": "mcp_1", "name": "f", "server_label": "s", "arguments": '{"a": 1}', **answer}
    call = {"type": "function_call", "call_id": "mcp_1", "name": "f", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "mcp_1", "output": content}
    question = {"role": "user", "content": "a"}
    assert input_messages([question, mcp, question], None) == input_messages([question, call, output, question], None)
    assert input_messages([question, {**mcp, "output": None, "error": None}], None) == input_messages([question], None)


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "stores no items"),
        ({"type": "unheard_of_call"}, "unheard_of_call"),
        ({"type": ["message"], "role": "user"}, "type is"),
        ({"role": "robot", "content": "x"}, "robot"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
        ({"role": "user", "content": 3}, "content is 3"),
        ({"role": "user", "content": [[]]}, "content[0]"),
        ({"role": "user"}, "None"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
    ],
)
def test_bad_items_are_named(item: dict[str, Any], word: str) -> None:
    """Oracle: the place of the item and its fault."""
    with pytest.raises(RequestError) as error:
        input_messages([{"role": "user", "content": "x"}, item], None)
    assert "input[1]" in str(error.value) and word in str(error.value) and error.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"n": 2}, "n"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [{"name": ["x"]}]}}, "tool_choice"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"input": []}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Oracle: the field's name; the message has the remedy."""
    with pytest.raises(RequestError) as error:
        chat_body(body(**fields))
    assert error.value.param == param


def test_truncation_by_the_server_changes_no_input() -> None:
    """Oracle: the chat of the same body without it; the Agents SDK and the AI SDK ask for it beside any input."""
    assert chat_body(body(truncation="auto")) == chat_body(body(truncation="disabled")) == chat_body(body())


def test_the_chat_of_a_body() -> None:
    """Oracle: the fields of the other endpoint."""
    asked = body(
        max_output_tokens=9,
        temperature=0.5,
        seed=3,
        stop=["x"],
        store=True,
        background=False,
        top_logprobs=2,
        tools=[WEATHER | {"strict": True, "description": None}],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    )
    chat = chat_body(asked)
    assert (chat.max_completion_tokens, chat.temperature, chat.seed, chat.stop) == (9, 0.5, 3, ["x"])
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    function = {"name": "weather", "parameters": WEATHER["parameters"], "strict": True}
    tools = json.loads(chat.model_dump_json(exclude_none=True))["tools"]
    assert tools == [{"type": "function", "function": function}]
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }


def test_allowed_tools_are_the_only_ones() -> None:
    """Oracle: the reference's ``allowed_tools``."""
    other = WEATHER | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    chat = chat_body(body(tools=[WEATHER, other], tool_choice=choice))
    tools = json.loads(chat.model_dump_json(exclude_none=True))["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["other"]
    assert chat.tool_choice == "required"


ITEM_KINDS = [kind for item in get_args(ResponseInputItemParam) for kind in kinds_of(item)]
# One item that has the fields of all kinds.
ANY_ITEM = {
    "id": "i", "call_id": "c", "role": "user", "name": "f", "arguments": "{}", "input": "x", "output": "o",
    "content": [{"type": "output_text", "text": "hm"}], "summary": [], "tools": [], "action": {}, "operation": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(ITEM_KINDS) - {"item_reference"}))
def test_no_item_of_the_reference_ends_a_conversation(kind: str) -> None:
    """Oracle: the official client's types name all kinds of items."""
    assert {"message", "custom_tool_call", "web_search_call", "additional_tools"} <= set(ITEM_KINDS)
    messages = input_messages([{"role": "user", "content": "x"}, ANY_ITEM | {"type": kind}], None)
    assert messages[0] == {"role": "user", "content": "x"}


def test_calls_and_outputs_of_all_kinds_of_tools() -> None:
    """Oracle: the chat of a model that has called functions; a note stands for a picture."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** "Begin"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a "}, image]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "id": "ls", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c3", "output": "a.py"},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "a.py", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "c5", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c5", "status": "completed"},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    told = [
        (
            [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())],
            message["content"],
        )
        for message in input_messages(items, None)[1:]
    ]
    assert told == [
        ([("apply_patch", '{"input": "*** \\"Begin\\"\\n"}')], ""),
        ([], "done"),
        ([("mcp__f", "{}")], ""),
        ([], "a [image omitted]"),
        ([("local_shell", '{"type": "exec", "command": ["ls"]}')], ""),
        ([], "a.py"),
        ([("shell", '{"commands": ["ls"]}')], ""),
        ([], '{"stdout": "a.py", "stderr": ""}'),
        ([("apply_patch", '{"type": "delete_file", "path": "a"}')], ""),
        ([], ""),
        ([], "No."),
    ]


SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [SPAWN, PATCH | {"name": "tell"}]}
TOOL_KINDS = [kind for tool in get_args(ToolParam) for kind in kinds_of(tool)]


def chat_tools(**fields: Any) -> tuple[list[str] | None, Any]:
    """The names of the chat's tools, and its choice."""
    chat = chat_body(body(**fields))
    return chat.tools and [tool["function"]["name"] for tool in chat.tools], chat.tool_choice


@pytest.mark.parametrize("kind", sorted({*TOOL_KINDS} - {"function", "custom", "namespace"} - {*CLIENT_TOOLS}))
def test_tools_that_a_server_would_run_are_left_out(kind: str) -> None:
    """Oracle: the official client's types name all kinds of tools; the choice of such a tool is refused by its name."""
    assert {"web_search", "local_shell", "mcp", "tool_search", *CLIENT_TOOLS} <= {*TOOL_KINDS}
    assert chat_tools(tools=[WEATHER, {"type": kind}], tool_choice="auto") == (["weather"], "auto")
    assert chat_tools(tools=[{"type": kind}], tool_choice="auto") == (None, None)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
    assert chat_tools(tools=[WEATHER, {"type": kind}], tool_choice=allowed) == (None, None)
    for choice in ("required", {"type": kind}, allowed | {"mode": "required"}):
        with pytest.raises(RequestError, match=kind) as error:
            chat_body(body(tools=[{"type": kind}], tool_choice=choice))
        assert error.value.param == "tool_choice"


def test_left_out_tools_are_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one line for each kind, over many requests."""
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        for _ in range(3):
            chat_body(body(tools=[{"type": "an_odd_kind"}, {"type": "an_odd_kind"}, {"type": "another"}]))
    assert [("an_odd_kind" in text, "another" in text) for text in caplog.messages] == [(True, False), (False, True)]


def test_namespaces_and_custom_tools_become_functions() -> None:
    """Oracle: vLLM's names; a function of a namespace may be chosen by its own name, and a tool may come in an item."""
    tools = [WEATHER, PATCH, AGENTS]
    names = ["weather", "apply_patch", "agents__spawn", "agents__tell"]
    assert chat_tools(tools=tools) == (names, None)
    extra = {"type": "additional_tools", "role": "developer", "tools": [WEATHER | {"name": "more"}]}
    items = [extra, {"role": "user", "content": "x"}]
    assert chat_tools(input=items, tools=tools) == ([*names, "more"], None)
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "spawn"}, "agents__spawn"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
    ):
        assert chat_tools(tools=tools, tool_choice=choice)[1] == {"type": "function", "function": {"name": name}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]}
    assert chat_tools(tools=tools, tool_choice=allowed) == (["agents__spawn", "agents__tell"], "auto")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin \\"Patch\\"\\n"}', '*** Begin "Patch"\n'),
        ('{"input": "cut o', "cut o"),
        ("not JSON", "not JSON"),
        ('{"patch": "x"}', '{"patch": "x"}'),
    ],
)
def test_calls_of_custom_tools_and_namespaces_have_the_clients_names(arguments: str, text: str) -> None:
    """Oracle: the official client's strict types; the client's own names and text; whole equals streamed."""
    calls = [
        {"id": "c0", "type": "function", "function": {"name": "apply_patch", "arguments": arguments}},
        {"id": "c1", "type": "function", "function": {"name": "agents__spawn", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    chat = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": USAGE}
    whole = new_writer(tools=[PATCH, AGENTS]).whole(chat)
    Response.model_validate(whole)
    patch, spawn = whole["output"]
    assert (patch["type"], patch["call_id"], patch["name"], patch["input"]) == (
        "custom_tool_call", "c0", "apply_patch", text,
    )  # fmt: skip
    assert (spawn["type"], spawn["namespace"], spawn["name"], spawn["arguments"]) == (
        "function_call", "agents", "spawn", "{}",
    )  # fmt: skip
    writer = new_writer(tools=[PATCH, AGENTS])
    events = writer.begin({})
    for index, call in enumerate(calls):
        function = call["function"]
        assert isinstance(function, dict)
        for piece in (
            {"name": function["name"], "arguments": ""},
            *({"arguments": one} for one in function["arguments"]),
        ):
            events += writer.take({"delta": {"tool_calls": [{"index": index, "id": call["id"], "function": piece}]}})
    events += writer.finish(USAGE)
    for one in events:
        EVENT.validate_python(one)
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text


# Pieces of one answer as the chat's deltas: reasoning, text, two calls.
ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
DELTAS: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning_content": "Let me "}},
    {"delta": {"reasoning_content": "think."}},
    {"delta": {"content": "It is "}, "logprobs": {"content": [ENTRY]}},
    {"delta": {"content": ""}, "logprobs": {"content": [ENTRY, ENTRY]}},
    {"delta": {"content": "😀."}, "logprobs": {"content": [ENTRY]}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}},
    {"delta": {"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "g", "arguments": "{}"}}]}},
]
MESSAGE = {
    "role": "assistant",
    "content": "It is 😀.",
    "reasoning_content": "Let me think.",
    "tool_calls": [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ],
}


def stream(deltas: list[dict[str, Any]], finish_reason: str) -> list[dict[str, Any]]:
    writer = new_writer()
    events = writer.begin({})
    for one in [*deltas, {"delta": {}, "finish_reason": finish_reason}]:
        events += writer.take(one)
    return events + writer.finish(USAGE)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key not in ("id", "item_id", "completed_at")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort", "tool_calls"])
def test_events_are_those_that_the_client_knows(finish_reason: str) -> None:
    """Oracle: the official client's own types (strict) and its accumulator of streams, for any part of the stream."""
    for num_deltas in range(len(DELTAS) + 1):
        check_stream(num_deltas, finish_reason)


def check_stream(num_deltas: int, finish_reason: str) -> None:
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    events = stream(DELTAS[:num_deltas], finish_reason)
    for number, one in enumerate(events):
        assert one["sequence_number"] == number
        state.handle_event(EVENT.validate_python(one))
    last = events[-1]
    expected = {"length": "incomplete", "abort": "cancelled"}.get(finish_reason, "completed")
    assert last["response"]["status"] == expected
    assert last["type"] == ("response.completed" if expected == "completed" else "response.incomplete")
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == last["response"]["output"] and done
    assert done[-1]["status"] == ("completed" if expected == "completed" else "incomplete")


def test_whole_equals_streamed() -> None:
    """Oracle: each equals the other, except for ids; and the client's strict type."""
    logprobs = {"content": [ENTRY] * 4}
    chat = {"choices": [{"message": MESSAGE, "logprobs": logprobs, "finish_reason": "tool_calls"}], "usage": USAGE}
    whole = new_writer(metadata={"k": "v"}, tools=[WEATHER]).whole(chat)
    parsed = Response.model_validate(whole)
    assert parsed.output_text == "It is 😀." and parsed.usage is not None
    assert (parsed.usage.input_tokens, parsed.usage.output_tokens, parsed.usage.total_tokens) == (7, 5, 12)
    assert parsed.usage.input_tokens_details.cached_tokens == 3
    assert parsed.usage.output_tokens_details.reasoning_tokens == 2
    assert [item.type for item in parsed.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole["store"], whole["metadata"], whole["top_p"]) == (False, {"k": "v"}, 0.5)
    streamed = stream(DELTAS, "tool_calls")[-1]["response"]
    assert without_ids(streamed["output"]) == without_ids(whole["output"])


def test_text_deltas_add_up() -> None:
    """Oracle: the text and the log-probabilities of the finished item."""
    events = stream(DELTAS, "stop")
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    done = next(one for one in events if one["type"] == "response.output_text.done")
    assert "".join(one["delta"] for one in deltas) == done["text"] == "It is 😀."
    assert list(itertools.chain.from_iterable(one["logprobs"] for one in deltas)) == done["logprobs"] == [ENTRY] * 4


def test_a_failure_ends_the_response() -> None:
    """Oracle: the client's strict types; open items are incomplete."""
    writer = new_writer()
    events = [*writer.begin({}), *writer.take(DELTAS[3]), *writer.fail(500, "rank 1 died")]
    for one in events:
        EVENT.validate_python(one)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["error"]["message"]) == (
        "response.failed", "failed", "rank 1 died",
    )  # fmt: skip
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        ({"reasoning": {"effort": "wild"}, "tools": [WEATHER | {"parameters": 3}]}, "tools", "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text ", "text"),
        ({"text": {"format": {"type": "xml"}}}, "text ", "text"),
    ],
)
def test_complaints_name_fields_of_the_request(fields: dict[str, Any], text: str, param: str) -> None:
    """Oracle: the names in the client's body, not those in the resulting chat."""
    # a model of text; the rest is asked for later
    processor: Any = SimpleNamespace(images=None, chat=SimpleNamespace(seal=ReasoningSeal()))
    with pytest.raises(RequestError) as error:
        prepare_response(body(**fields), processor, "demo")
    assert str(error.value).startswith(text) and error.value.param == param
