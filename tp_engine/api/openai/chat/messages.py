"""From chat messages as clients send them to messages as templates expect them.

| clients send | templates get |
| --- | --- |
| null fields, as the OpenAI library dumps them | nothing |
| content as text | the same text; a part where the template takes parts only |
| no content in a message of the assistant | an empty text; null beside calls where the template shows them only then |
| content as parts of text | parts where the template takes them, else their texts joined with line ends |
| the content of a tool's answer | text |
| an image | a part ``{"type": "image"}`` in its place, where the model takes images (``images.py``) |
| tool_calls with arguments as JSON text | arguments as an object, or the text if the template takes that alone |
| arguments that are no object | the text, as it is or as ``INVALID_JSON`` of an object; the log says so |
| parts of the kind thinking | reasoning |
| reasoning | reasoning_content too, its name in most templates, or thinking if the template knows that alone |
| an answer of a tool, with the call's id | also the function's name |
| ids of calls | the same, or numbered ones, if the model knows those alone |
| calls that the template does not show | their text in the content, as the model writes it |
| role developer | system, if the template does not know developer |
| a system message behind others | one of the user, or a part of the first, where the template shows no other |
| two messages in a row that the template does not take, such as two of the user | one |
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.api.openai.chat.capabilities import TemplateCapabilities
from tp_engine.api.openai.tools.events import unread_arguments
from tp_engine.api.openai.tools.text_parser import valid_unicode
from tp_engine.api.openai.tools.tool_format import ToolFormat
from tp_engine.errors import RequestError, shown
from tp_engine.images.sources import ImageSource, image_source, is_image_part
from tp_engine.log import get_logger, warn_once

logger = get_logger(__name__)

_MAX_SHOWN = 80
# The kind of a part -> its field that has the text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def normal_messages(
    messages: Sequence[Mapping[str, Any]],
    takes: TemplateCapabilities,
    calls_format: ToolFormat | None = None,
    images: list[ImageSource] | None = None,
) -> list[dict[str, Any]]:
    """Checked copies, for a template that takes ``takes``; raises ``RequestError`` that names the faulty message.

    ``calls_format`` is that of the calls, whose ids take its form, if it has one (``ToolFormat.numbered_id``), and
    which are texts in it where the template does not show them; None: they stay as they are.  ``images`` gets those of
    all messages, in their order; None: the model takes none.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    normal = [
        _normal_message(f"messages[{index}]", message, takes_images=images is not None)
        for index, message in enumerate(messages)
    ]
    if images is not None:
        given = (part for message in normal if isinstance(message["content"], list) for part in message["content"])
        images += [part for part in given if isinstance(part, ImageSource)]
    _name_tools(normal)
    if calls_format is not None and calls_format.numbered_id:
        _number_calls(normal, calls_format.numbered_id)
    normal = _placed(normal, takes)
    for message in normal:
        given, has_calls = message["content"], "tool_calls" in message
        # the template of gpt-oss refuses thinking in a message with both content and calls
        if takes.takes_thinking and "reasoning_content" in message and not (has_calls and any(given or "")):
            message.setdefault("thinking", message["reasoning_content"])
        stays_null = given is None and has_calls and takes.calls.null_content
        message["content"] = None if stays_null else takes.form(message["role"]).content(given or "")
    calls = [call for message in normal for call in message.get("tool_calls", ())]
    give_arguments = _give_texts if takes.calls.argument_texts else _give_objects
    give_arguments(calls)
    if calls_format is not None and not takes.calls.are_shown:
        _write_calls(normal, takes, calls_format)
    return normal


def _placed(messages: Sequence[dict[str, Any]], takes: TemplateCapabilities) -> list[dict[str, Any]]:
    """The messages in roles and an order that the template takes: agents add system messages as they go, and two
    messages of the user in a row."""
    placed: list[dict[str, Any]] = []
    contents: list[list[Any]] = []  # of each that is placed
    for message in messages:
        last = placed[-1] if placed else {}
        if message["role"] == "developer" and not takes.knows_developer:
            message["role"] = "system"
        if message["role"] == "system" and takes.one_system and last.get("role", "system") != "system":
            message["role"] = "user"
        pair = last.get("role"), message["role"]
        is_joined = pair in takes.joins or (takes.one_system and pair == ("system", "system"))
        if is_joined and ("tool_calls" not in last or message["role"] == "assistant"):
            placed[-1] = _as_one(last, message)
            contents[-1].append(message["content"])
        else:
            placed.append(message)
            contents.append([message["content"]])
    for message, given in zip(placed, contents, strict=True):
        if len(given) > 1:
            message["content"] = _joined(given)
    return placed


def _as_one(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages as one, but for their contents."""
    both = {**second, **first}
    for name, join in (("tool_calls", lambda one, other: [*one, *other]), ("reasoning_content", "{}\n\n{}".format)):
        if name in first and name in second:
            both[name] = join(first[name], second[name])
    return both


def _joined(contents: Sequence[Any]) -> Any:
    """Several contents as one: a text if all are, else the parts of all."""
    contents = [one for one in contents if one]
    if all(isinstance(one, str) for one in contents):
        return "\n\n".join(contents)
    return [part for one in contents for part in ([one] if isinstance(one, str) else one)]


def _write_calls(messages: Sequence[dict[str, Any]], takes: TemplateCapabilities, calls_format: ToolFormat) -> None:
    """Add calls to the contents of their messages, as the model writes them."""
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        written = calls_format.written([(one["name"], _object(one["arguments"]) or {}) for one in functions])
        if functions and written:
            given = message["content"]
            texts = [part["text"] for part in given] if isinstance(given, list) else [given or ""]
            message["content"] = takes.form(message["role"]).content("".join(texts) + written)


def _give_texts(calls: Sequence[Mapping[str, Any]]) -> None:
    """Give the arguments of ``calls`` as JSON text, a text as it was sent."""
    for call in calls:
        given = call["function"].get("arguments")
        is_text = isinstance(given, str) and given.strip()
        call["function"]["arguments"] = given if is_text else json.dumps(_object(given) or {}, ensure_ascii=False)


def _give_objects(calls: Sequence[Mapping[str, Any]]) -> None:
    """Give the arguments of ``calls`` as objects: templates write them in their model's own spelling.

    A model may have written anything, or a limit may have cut it off; refusing that would end the conversation.
    """
    wrong = []
    for call in calls:
        given = call["function"].get("arguments")
        arguments = _object(given)
        if arguments is None:
            wrong.append(call)
            logger.debug("arguments that are no JSON object: %r", given)
            arguments = unread_arguments(given)
        call["function"]["arguments"] = arguments
    if wrong:
        function = wrong[0]["function"]
        logger.warning(
            "%d of %d calls in the messages have arguments that are no JSON object, first one of the function %s; the "
            "chat template gets them as one value, INVALID_JSON",
            len(wrong),
            len(calls),
            shown(function["name"], _MAX_SHOWN),
        )


def _object(given: object) -> dict[str, Any] | None:
    """The object that arguments stand for; null and an empty text are empty, other values None."""
    try:
        value = json.loads(given) if isinstance(given, str) and given.strip() else given
        if isinstance(given, str) and _SURROGATE.search(given):
            value = json.loads(valid_unicode(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    return value if isinstance(value, dict) else None


def _name_tools(messages: Sequence[dict[str, Any]]) -> None:
    """Add function names to tools' answers: clients give the id of the call, some templates need the function."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message["name"] = name


def _number_calls(messages: Sequence[dict[str, Any]], form: str) -> None:
    """Give calls, and the tools' answers to them, ids of this form."""
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            new_id = form.format(name=call["function"]["name"], number=number)
            ids[str(call.get("id"))] = new_id
            call["id"] = new_id
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(str(message["tool_call_id"]), message["tool_call_id"])


def _normal_message(where: str, message: object, *, takes_images: bool) -> dict[str, Any]:
    """A checked copy whose content is a text, the texts and images of its parts, or None."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r}; it must have a role and a content", param="messages")
    normal = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; it must be text such as 'user'", param="messages")
    normal["content"] = _content(where, role, normal.get("content"), takes_images)
    if calls := normal.pop("tool_calls", None):
        if not isinstance(calls, (list, tuple)):
            raise RequestError(f"{where}.tool_calls must be a list of calls", param="messages")
        normal["tool_calls"] = [_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    reasoning = normal.get("reasoning_content", normal.get("reasoning", _thinking(message.get("content"))))
    if reasoning is not None:
        normal["reasoning_content"] = reasoning
    return normal


def _content(where: str, role: str, content: object, takes_images: bool) -> str | list[str | ImageSource] | None:
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where} has no content; it must be text, or a list of text parts", param="messages")
        return None
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where}.content must be text, or a list of text parts", param="messages")
    places = [(f"{where}.content[{index}]", part) for index, part in enumerate(content) if not _is_thinking(part)]
    return [
        image_source(place, part)
        if takes_images and is_image_part(part)
        else _part_text(place, role, part, takes_images)
        for place, part in places
    ]


def _is_thinking(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "thinking" and isinstance(part.get("thinking"), str)


def _thinking(content: object) -> str | None:
    """The reasoning that stands among the parts of a content."""
    parts = content if isinstance(content, (list, tuple)) else ()
    return "".join(part["thinking"] for part in parts if _is_thinking(part)) or None


def _part_text(where: str, role: str, part: object, takes_images: bool) -> str:
    """The text of a part.  In a tool's answer a note stands for a picture, which would else end the conversation."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    key = _TEXTS.get(str(kind))
    if isinstance(part, Mapping) and key is not None and isinstance(part.get(key), str):
        return str(part[key])
    if role == "tool" and isinstance(part, Mapping) and isinstance(kind, str) and key is None:
        return omitted(kind)
    if key is not None:
        raise RequestError(f"{where} is a part of type {kind!r}, but has no text in {key!r}", param="messages")
    supported = "only text and images (image_url) are supported" if takes_images else "only text is supported"
    raise RequestError(f"{where} is a part of type {shown(kind)}; {supported}", param="messages")


def omitted(kind: str) -> str:
    """Return what stands for a part of a tool's answer that is no text; the log says so once for each kind."""
    warn_once(
        logger, "parts of the type %s in tools' answers are left out: a note stands there", shown(kind, _MAX_SHOWN)
    )
    return f"[{kind[:_MAX_SHOWN].removeprefix('input_').removesuffix('_url')} omitted]"


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be {{'id', 'type': 'function', 'function': {{'name'}}}}", param="messages")
    return {**call, "function": dict(function)}
