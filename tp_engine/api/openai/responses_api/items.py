"""From the items of a Responses ``input`` to the messages of a chat.

::

    input item                                message of the chat
    message (user, system, developer)         a message; developer becomes system, which chat templates know
    message (assistant), reasoning, and all
    calls of the client's tools               one assistant message, as long as they follow each other
    outputs of these calls                    a message of the role tool
    mcp_call, with its output or error        both: a call of the assistant's message, and its answer
    what a server's own tool found or made    its texts and images, as the assistant's message
    what the model need not see               nothing; the log says so
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from tp_engine.api.openai.chat.messages import FAILED, omitted
from tp_engine.api.openai.responses_api.tools import custom_arguments, flat_name
from tp_engine.errors import RequestError, shown
from tp_engine.images.sources import ImageSource, image_source, is_image_part
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

Item = Mapping[str, Any]
Messages = list[dict[str, Any]]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}
# What a server's own tools did, what only that server can read, and settings: nothing for a chat's model.
# ``additional_tools`` below reads the last.
_UNTOLD = frozenset({
    "additional_tools", "code_interpreter_call", "compaction", "compaction_trigger", "configuration_update",
    "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
# By kind of output: the value of a missing one; None if it is required.  Null is an empty text: a tool had nothing to
# say.
_OUTPUTS: Mapping[str, str | None] = {
    "function_call_output": None,
    "custom_tool_call_output": None,
    "local_shell_call_output": None,
    "shell_call_output": None,
    "apply_patch_call_output": "",
    "computer_call_output": None,
}


def input_messages(items: str | Sequence[Item], instructions: str | None, *, takes_images: bool = False) -> Messages:
    """Chat messages of an ``input``; ``instructions`` come first.  Raises ``RequestError``.

    System messages at the beginning become one, because most chat templates take only one.  Images, for a model that
    ``takes_images``, are parts of the contents of messages.
    """
    messages: Messages = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise RequestError("input is an empty list; give text or at least one item", param="input")
    for number, item in enumerate(items):
        _add_item(messages, f"input[{number}]", item, takes_images=takes_images)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    if not messages:
        raise RequestError("input has no item that the model can read; give at least one message", param="input")
    return _one_system_message(messages)


def additional_tools(items: str | Sequence[Item]) -> list[Item]:
    """The tools that items of an ``input`` bring, beside those of the body."""
    found: list[Item] = []
    for item in () if isinstance(items, str) else items:
        tools = item.get("tools") if item.get("type") == "additional_tools" else None
        found += [tool for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return found


def _add_item(messages: Messages, where: str, item: Item, *, takes_images: bool) -> None:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type is {shown(kind, 60)}; it must be text, such as message", param="input")
    if kind == "message":
        _add_message(messages, where, item, takes_images=takes_images)
    elif kind in _CALLS and (kind != "mcp_call" or _mcp_answer(item) is not None):
        name, arguments = _CALLS[kind](where, item)
        function = {"name": name, "arguments": arguments}
        call = {"id": _call_id(where, item), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
        if kind == "mcp_call":
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": _mcp_answer(item)})
    elif kind in _OUTPUTS:
        messages.append(_answer(where, kind, item, takes_images=takes_images))
    elif kind == "reasoning":
        text = _text(f"{where}.content", item.get("content") or item.get("summary") or "")
        if text:
            _assistant(messages, begins_turn=True).setdefault("reasoning_content", []).append(text)
    elif kind in _UNTOLD:
        texts = "\n".join(_found(item))
        pictures = _pictures(where, kind, item) if takes_images else []
        if texts or pictures:
            given = [*([texts] if texts else ()), *pictures] if pictures else texts
            _assistant(messages, begins_turn=True)["content"] = given
        elif kind != "additional_tools":
            warn_once(logger, "items of the type %s are left out of responses: they tell the model nothing", kind)
    elif kind == "item_reference":
        raise RequestError(f"{where} is an item_reference; this server stores no items, send it whole", param="input")
    else:
        raise RequestError(
            f"{where}.type is {shown(kind, 60)}; it must be message, reasoning, function_call, function_call_output "
            "or another item of the Responses API",
            param="input",
        )


def _answer(where: str, kind: str, item: Item, *, takes_images: bool) -> dict[str, Any]:
    """The message of a tool's output."""
    output, place = item.get("output", _OUTPUTS[kind]), f"{where}.output"
    if output is None and "output" in item:
        output = ""
    if not output and item.get("status") == "failed":
        output = FAILED
    if kind == "computer_call_output" and not isinstance(output, list):  # one part
        output = [output]
    answer: Any = _parts(place, output, _output_part) if takes_images and _has_image(output) else None
    if answer is None and isinstance(output, list):  # with a note instead of a picture or a file
        answer = "".join(_output_part(f"{place}[{number}]", part) for number, part in enumerate(output))
    content = _text(place, output) if answer is None else answer
    return {"role": "tool", "tool_call_id": _call_id(where, item), "content": content}


def _mcp_answer(item: Item) -> str | None:
    """What a tool of an MCP server, which OpenAI's server has called, answered; None if it has not."""
    said = item.get("error") if item.get("output") is None else item["output"]
    return said if said is None or isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def _function_call(where: str, item: Item) -> tuple[str, Any]:
    name, namespace = _string(where, item, "name"), item.get("namespace")
    return name if namespace is None else flat_name(namespace, name), item.get("arguments")


def _built_in(name: str, field: str) -> Callable[[str, Item], tuple[str, Any]]:
    """The call of a tool that OpenAI defines and the client runs: the tool's name, and ``field`` as its arguments."""
    return lambda where, item: (name, json.dumps(item.get(field) or {}, ensure_ascii=False))


# The kind of a call -> the name of the function in the chat, and its arguments as the client sent them.
_CALLS: Mapping[str, Callable[[str, Item], tuple[str, Any]]] = {
    "function_call": _function_call,
    "mcp_call": _function_call,
    "custom_tool_call": lambda where, item: (
        _string(where, item, "name"),
        custom_arguments(_string(where, item, "input")),
    ),
    "local_shell_call": _built_in("local_shell", "action"),
    "shell_call": _built_in("shell", "action"),
    "apply_patch_call": _built_in("apply_patch", "operation"),
    "computer_call": lambda where, item: (
        "computer",
        json.dumps(item.get("action") or {"actions": item.get("actions") or []}, ensure_ascii=False),
    ),
}


def _add_message(messages: Messages, where: str, item: Item, *, takes_images: bool) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {shown(role, 60)}; it must be one of {', '.join(_ROLES)}", param="input")
    if content is None and role == "assistant":
        return
    place = f"{where}.content"
    has_images = takes_images and _has_image(content)
    given = _parts(place, content, _part_text) if has_images else _text(place, content)
    if role == "assistant":
        _assistant(messages, begins_turn=True)["content"] = given
    else:
        messages.append({"role": _ROLES[role], "content": given})


def _found(item: Item) -> list[str]:
    """The texts of what a server's own tool did: a program's output, parts of files, the answer of a call."""
    lists = ((item.get("outputs"), "logs"), (item.get("results"), "text"))
    inner = [one.get(name) for given, name in lists if isinstance(given, list) for one in given if _is_item(one)]
    return [text for text in (item.get("output"), item.get("error"), *inner) if isinstance(text, str) and text]


def _is_item(one: object) -> TypeGuard[Item]:
    return isinstance(one, Mapping)


def _pictures(where: str, kind: str, item: Item) -> list[ImageSource]:
    """The images of what a server's own tool did."""
    if kind == "image_generation_call" and item.get("result") is not None:
        part = {"type": "image", "base64": item["result"]}
        return [image_source(f"{where}.result", part)]
    outputs = item.get("outputs")
    places = enumerate(outputs) if isinstance(outputs, list) else ()
    return [image_source(f"{where}.outputs[{number}]", one) for number, one in places if is_image_part(one)]


def _assistant(messages: Messages, *, begins_turn: bool = False) -> dict[str, Any]:
    """The assistant's message that the conversation ends with, or a new one.

    Text that ``begins_turn`` cannot follow text or calls of the same message.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (begins_turn and (last.get("content") or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _one_system_message(messages: Messages) -> Messages:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    contents = [message["content"] for message in messages[:leading]]
    if all(isinstance(one, str) for one in contents):
        return [{"role": "system", "content": "\n\n".join(contents)}, *messages[leading:]]
    parts = [part for one in contents for part in ([one] if isinstance(one, str) else one)]
    return [{"role": "system", "content": parts}, *messages[leading:]]


def _has_image(content: object) -> bool:
    return isinstance(content, list) and any(map(is_image_part, content))


def _parts(where: str, content: Any, text: Callable[[str, Any], str]) -> list[Any]:
    """The parts of a content that ``_has_image``; ``text`` reads the parts that are not images."""
    places = [(f"{where}[{number}]", part) for number, part in enumerate(content)]
    return [image_source(place, part) if is_image_part(part) else text(place, part) for place, part in places]


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {shown(content, 60)}; it must be text or a list of text parts", param="input")
    return "".join(_part_text(f"{where}[{number}]", part) for number, part in enumerate(content))


def _output_part(where: str, part: object) -> str:
    """A part of a tool's answer.  A note stands for a picture, lest an error end the conversation for good."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind is None:  # of a shell: {"stdout": ..., "stderr": ..., "outcome": ...}
        return json.dumps(part, ensure_ascii=False)
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        return omitted(kind)
    return _part_text(where, part)


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type")
        name = "refusal" if kind == "refusal" else "text"
        if isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get(name), str):
            return str(part[name])
        raise RequestError(f"{where} has the type {shown(kind, 60)}; only parts of text are supported", param="input")
    raise RequestError(f"{where} is {shown(part, 60)}; it must be a part such as an input_text", param="input")


def _call_id(where: str, item: Item) -> str:
    """The id of the call, which an output of ``local_shell`` has as its own."""
    return _string(where, item, "call_id" if item.get("call_id") is not None or "id" not in item else "id")


def _string(where: str, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is {shown(value, 60)}; it must be text", param="input")
    return value
