"""Tools that vendors have described and the client runs: what the model is told, and their calls in each API's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from tests.asgi import App
from tests.unit.api.test_chat_answers import QUESTION, last_request, serve, speaking
from tests.unit.api.test_responses_api import EVENT, USAGE, WEATHER, chat_tools, new_writer, without_ids
from tp_engine.api.anthropic.client_tools import client_function
from tp_engine.api.anthropic.protocol import Tool
from tp_engine.api.openai.responses_api.items import input_messages
from tp_engine.errors import RequestError

ACTION = {"type": "click", "button": "left", "x": 5, "y": 6}
# A tool, the arguments of its function, and the type of its item with what it has of them.
CALLS: list[tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = [
    ({"type": "local_shell"}, "local_shell", {"command": ["ls", "-l"]},
     {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}}),
    ({"type": "shell"}, "shell", {"commands": ["ls"], "timeout_ms": 5},
     {"type": "shell_call", "environment": {"type": "local"},
      "action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None}}),
    ({"type": "shell", "environment": {"type": "local"}}, "shell", {"commands": []},
     {"type": "shell_call", "environment": {"type": "local"},
      "action": {"commands": [], "timeout_ms": None, "max_output_length": None}}),
    ({"type": "apply_patch"}, "apply_patch", {"type": "delete_file", "path": "a"},
     {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
    ({"type": "apply_patch"}, "apply_patch", {"type": "create_file", "path": "a", "diff": "+x"},
     {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+x"}}),
    ({"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"}, "computer",
     ACTION, {"type": "computer_call", "pending_safety_checks": [], "action": ACTION}),
    ({"type": "computer"}, "computer", {"actions": [ACTION, {"type": "screenshot"}]},
     {"type": "computer_call", "pending_safety_checks": [], "actions": [ACTION, {"type": "screenshot"}]}),
]  # fmt: skip
SHELL = {"type": "shell", "environment": {"type": "container_auto"}}


def answered(tool: dict[str, Any], name: str, arguments: str, reason: str = "tool_calls") -> Any:
    """The whole response of a call, which is also what the stream ends with, checked by the official client's types."""
    call = {"id": "c0", "type": "function", "function": {"name": name, "arguments": arguments}}
    chat = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": reason}], "usage": USAGE}
    whole = new_writer(tools=[tool]).whole(chat)
    writer = new_writer(tools=[tool])
    events = writer.begin({})
    for piece in ({"name": name, "arguments": ""}, *({"arguments": one} for one in arguments)):
        events += writer.take({"delta": {"tool_calls": [{"index": 0, "id": "c0", "function": piece}]}})
    events += writer.take({"delta": {}, "finish_reason": reason})
    events += writer.finish(USAGE)
    for one in events:
        EVENT.validate_python(one)
    Response.model_validate(whole)
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    added, done = (
        one["item"] for one in events if one["type"] in ("response.output_item.added", "response.output_item.done")
    )
    assert (added["id"], added["type"]) == (done["id"], done["type"])
    return whole["output"]


@pytest.mark.parametrize(("tool", "name", "arguments", "item"), CALLS)
def test_calls_have_the_tools_own_items(
    tool: dict[str, Any], name: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    """Oracle: the official client's types, whole and streamed; sent back, the model's history has what it wrote."""
    names, _ = chat_tools(tools=[WEATHER, tool])
    assert names == ["weather", name]
    (found,) = answered(tool, name, json.dumps(arguments))
    assert without_ids(found) == {**item, "call_id": "c0", "status": "completed"}
    (message,) = input_messages([found], None)
    (call,) = message["tool_calls"]
    assert call["id"] == "c0" and call["function"]["name"] == name
    assert json.loads(call["function"]["arguments"]).items() >= arguments.items()


WRONG = [
    "", "{", "[]", "{}", "5", '{"command": "ls"}', '{"commands": [1]}', '{"type": "fly"}', '{"actions": [5]}',
    '{"type": "click", "x": 1}', '{"command": [], "timeout_ms": "5"}', '{"commands": [], "timeout_ms": true}',
    '{"actions": [{"type": "drag"}]}', '{"command": [], "type": "run"}', '{"command": [], "env": {"a": 1}}',
    '{"type": "create_file", "path": "a"}',
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG)
@pytest.mark.parametrize("tool", [one[0] for one in CALLS])
def test_calls_that_the_tool_does_not_have_are_functions(tool: dict[str, Any], arguments: str) -> None:
    """Oracle: the client sees what the model wrote, and no item that its types refuse."""
    _, name, _, item = next(one for one in CALLS if one[0] is tool)
    (found,) = answered(tool, name, arguments)
    assert (found["type"], found["name"], found["arguments"]) == ("function_call", name, arguments)
    (cut,) = answered(tool, name, '{"comma', "length")
    assert (cut["type"], cut["status"]) == ("function_call", "incomplete") and item["type"] != "function_call"


def test_tools_of_the_responses_api_can_be_chosen() -> None:
    """Oracle: a chat's choice of the function; one that OpenAI's servers would run stays out, with its kind."""
    for tool, name, _, _ in CALLS:
        forced = {"type": "function", "function": {"name": name}}
        assert chat_tools(tools=[WEATHER, tool], tool_choice={"type": tool["type"]}) == (["weather", name], forced)
        assert chat_tools(tools=[tool], tool_choice="required") == ([name], "required")
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": tool["type"]}]}
        assert chat_tools(tools=[WEATHER, tool], tool_choice=allowed) == ([name], "auto")
    assert chat_tools(tools=[WEATHER, SHELL]) == (["weather"], None)
    with pytest.raises(RequestError, match="shell"):
        chat_tools(tools=[SHELL], tool_choice="required")


@pytest.mark.parametrize(
    ("kind", "name", "fields", "properties"),
    [
        ("bash_20250124", "bash", {}, {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"max_characters": 9000},
         {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line", "insert_text"}),
        ("text_editor_20241022", "str_replace_editor", {},
         {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"}),
        ("memory_20250818", "memory", {},
         {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line", "insert_text", "old_path",
          "new_path"}),
        ("computer_20241022", "computer", {"display_width_px": 800, "display_height_px": 600},
         {"action", "coordinate", "text"}),
        ("computer_20250124", "computer", {"display_width_px": 800, "display_height_px": 600},
         {"action", "coordinate", "text", "start_coordinate", "scroll_direction", "scroll_amount", "duration", "key"}),
        ("computer_20251124", "computer", {"display_width_px": 800, "display_height_px": 600, "enable_zoom": True},
         {"action", "coordinate", "text", "start_coordinate", "scroll_direction", "scroll_amount", "duration", "key",
          "region"}),
    ],
)  # fmt: skip
def test_the_functions_of_anthropics_tools(kind: str, name: str, fields: dict[str, Any], properties: set[str]) -> None:
    """Oracle: the published inputs of each version; a screen's size and limits are told."""
    function = client_function(Tool.model_validate({"type": kind, "name": name, **fields}))
    assert function is not None and function["name"] == name
    assert function["parameters"]["properties"].keys() == properties
    assert {*function["parameters"]["required"]} <= properties
    for value in fields.values():
        assert value is True or str(value) in function["description"]
    commands = function["parameters"]["properties"].get("command", {}).get("enum", ())
    assert ("undo_edit" in commands) == (name == "str_replace_editor")


def test_calls_of_anthropics_tools() -> None:
    """Oracle: a ``tool_use`` block of the tool's name; the model has been told; the tool can be forced."""
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]

    async def scenario(app: App) -> None:
        body = {"max_tokens": 200, "messages": [QUESTION], "tools": tools}
        answer = (await app.post("/v1/messages", body)).json()
        (use,) = answer["content"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "bash", {"command": "ls"})
        assert answer["stop_reason"] == "tool_use"
        prompt = bytes(one for one in last_request(app).prompt_token_ids if one < 256).decode()
        assert '"name": "bash"' in prompt and "web_search" not in prompt
        forced = await app.post("/v1/messages", {**body, "tool_choice": {"type": "tool", "name": "bash"}})
        assert forced.status == 200
        counted = (await app.post("/v1/messages/count_tokens", {"messages": [QUESTION], "tools": tools})).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]

    serve(speaking(text), scenario)
