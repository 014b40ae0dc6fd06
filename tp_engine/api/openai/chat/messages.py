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
| arguments that are not an object | the text, as it is or as ``INVALID_JSON`` of an object; the log says so |
| reasoning, calls and answers in other spellings | the usual ones (``spellings.py``) |
| reasoning_content | the same, its name in most templates, or thinking if the template knows that alone |
| an answer of a tool, with the call's id | also the function's name |
| calls, answers of tools, and their ids | turns and ids that the template takes (``turns.py``) |
| calls that the template does not show | their text in the content, as the model writes it |
| role developer | system, if the template does not know developer |
| a system message after others | one of the user, or a part of the first, if the template shows no other |
| two messages in a row that the template does not take, such as two of the user | one |
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.api.openai.chat.capabilities import TemplateCapabilities
from tp_engine.api.openai.chat.spellings import in_one_spelling, is_thought
from tp_engine.api.openai.chat.turns import complete_ids, merged, name_tools, number_calls, shorten_ids, with_answers
from tp_engine.api.openai.tools.events import unread_arguments
from tp_engine.api.openai.tools.text_parser import valid_unicode
from tp_engine.api.openai.tools.tool_format import ToolFormat
from tp_engine.errors import RequestError, shown
from tp_engine.images.sources import DocumentSource, ImageSource, image_source, is_image_part
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

FAILED = "[the tool failed]"  # the answer of a tool that gives no other
_MAX_SHOWN = 80
_MOST_ARGUMENT_PARTS = 1_000_000
_PART_MARKS = ",[{"
# By kind of part: the field with its text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def normal_messages(
    messages: Sequence[Mapping[str, Any]],
    takes: TemplateCapabilities,
    calls_format: ToolFormat | None = None,
    images: list[ImageSource] | None = None,
    *,
    adapts_calls: bool = False,
) -> list[dict[str, Any]]:
    """Checked copies, for a template that takes ``takes``; raises ``RequestError``, which names the faulty message.

    ``adapts_calls``: calls and answers of tools come in turns, and with ids, that the template takes (``turns.py``);
    the template gets calls that it does not show as texts in ``calls_format``.  ``images`` gets those of all messages,
    in their order; None: the model takes none.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    normal = [
        _normal_message(f"messages[{index}]", message, takes_images=images is not None)
        for index, message in enumerate(messages)
    ]
    if adapts_calls:
        complete_ids(normal)
    name_tools(normal)
    if adapts_calls and (takes.one_call or takes.answers_first):
        normal = with_answers(
            normal, one_call=takes.one_call, answers_first=takes.answers_first, hides_answers=takes.hides_answers
        )
    if adapts_calls and takes.short_ids:
        shorten_ids(normal)
    if adapts_calls and calls_format is not None and calls_format.numbered_id:
        number_calls(normal, calls_format.numbered_id)
    if images is not None:
        given = (part for message in normal if isinstance(message["content"], list) for part in message["content"])
        images += [part for part in given if isinstance(part, ImageSource)]
    normal = _placed(normal, takes)
    for message in normal:
        given, has_calls = message["content"], "tool_calls" in message
        # the template of gpt-oss refuses thinking in a message with both content and calls
        if takes.takes_thinking and "reasoning_content" in message and not (has_calls and any(given or "")):
            message.setdefault("thinking", message["reasoning_content"])
        stays_null = given is None and has_calls and takes.calls.null_content
        message["content"] = None if stays_null else takes.form(message["role"]).content(given or "")
    calls = [call for message in normal for call in message.get("tool_calls", ())]
    _check_size(calls)
    give_arguments = _give_texts if takes.calls.argument_texts else _give_objects
    give_arguments(calls)
    if adapts_calls and calls_format is not None and not takes.calls.are_shown:
        _write_calls(normal, takes, calls_format)
    return normal


def _placed(messages: Sequence[dict[str, Any]], takes: TemplateCapabilities) -> list[dict[str, Any]]:
    """The messages in roles and an order that the template takes: agents add system messages as they go, and two
    messages of the user in a row."""
    groups: list[list[dict[str, Any]]] = []  # each becomes one message
    has_calls = False  # of the last group
    for message in messages:
        last_role = groups[-1][0]["role"] if groups else None
        if message["role"] == "developer" and not takes.knows_developer:
            message["role"] = "system"
        if message["role"] == "system" and takes.one_system and last_role not in (None, "system"):
            message["role"] = "user"
        pair = last_role, message["role"]
        is_joined = pair in takes.joins or (takes.one_system and pair == ("system", "system"))
        if is_joined and (not has_calls or message["role"] == "assistant"):
            groups[-1].append(message)
            has_calls = has_calls or "tool_calls" in message
        else:
            groups.append([message])
            has_calls = "tool_calls" in message
    return [merged(group) for group in groups]


def _write_calls(messages: Sequence[dict[str, Any]], takes: TemplateCapabilities, calls_format: ToolFormat) -> None:
    """Add calls to the contents of their messages, as the model writes them."""
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        written = calls_format.written([(one["name"], _object(one["arguments"]) or {}) for one in functions])
        if functions and written:
            given = message["content"]
            texts = [part["text"] for part in given] if isinstance(given, list) else [given or ""]
            message["content"] = takes.form(message["role"]).content("".join(texts) + written)


def _check_size(calls: Sequence[Mapping[str, Any]]) -> None:
    """Refuse arguments with so many parts that reading them would take long: it stops all other threads."""
    given = (call["function"].get("arguments") for call in calls)
    num_parts = sum(text.count(mark) for text in given if isinstance(text, str) for mark in _PART_MARKS)
    if num_parts > _MOST_ARGUMENT_PARTS:
        raise RequestError(
            f"the arguments of the messages' calls have {num_parts:,} commas and brackets; at most "
            f"{_MOST_ARGUMENT_PARTS:,} are allowed: leave out old messages",
            param="messages",
        )


def _give_texts(calls: Sequence[Mapping[str, Any]]) -> None:
    """Turn the arguments of ``calls`` into JSON text; a text stays as it was sent."""
    for call in calls:
        given = call["function"].get("arguments")
        is_text = isinstance(given, str) and given.strip()
        call["function"]["arguments"] = given if is_text else json.dumps(_object(given) or {}, ensure_ascii=False)


def _give_objects(calls: Sequence[Mapping[str, Any]]) -> None:
    """Turn the arguments of ``calls`` into objects: templates write them in their model's own spelling.

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
    """The object that arguments stand for: empty for null and an empty text, None for other values."""
    try:
        value = json.loads(given) if isinstance(given, str) and given.strip() else given
        if isinstance(given, str) and _SURROGATE.search(given):
            value = json.loads(valid_unicode(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    return value if isinstance(value, dict) else None


def _normal_message(where: str, message: object, *, takes_images: bool) -> dict[str, Any]:
    """A checked copy whose content is a text, the texts and images of its parts, or None."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {shown(message)}; it must have a role and a content", param="messages")
    normal = in_one_spelling(where, message)
    role = normal.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {shown(role)}; it must be text such as 'user'", param="messages")
    if normal.get("images"):
        raise RequestError(
            f"{where}.images: images are parts of the content, such as {{'type': 'image_url', 'image_url': {{'url': "
            "'data:image/png;base64,...'}}",
            param="messages",
        )
    normal["content"] = _content(where, role, normal.get("content"), takes_images)
    if calls := normal.pop("tool_calls", None):
        if not isinstance(calls, (list, tuple)):
            raise RequestError(f"{where}.tool_calls must be a list of calls", param="messages")
        normal["tool_calls"] = [_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
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
    places = [(f"{where}.content[{index}]", part) for index, part in enumerate(content) if not is_thought(part)]
    return [
        image_source(place, part)
        if takes_images and is_image_part(part)
        else _part_text(place, role, part, takes_images)
        for place, part in places
    ]


def _part_text(where: str, role: str, part: object, takes_images: bool) -> str:
    """The text of a part.  In a tool's answer a note stands for a picture, lest an error end the conversation."""
    if isinstance(part, str):
        return part
    if isinstance(part, ImageSource):  # from another API, for a model that takes none
        part = {"type": "file" if isinstance(part, DocumentSource) else "image"}
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
    """What stands for a part of a tool's answer that is not text; the log says so once for each kind."""
    warn_once(
        logger, "parts of the type %s in tools' answers are left out: a note stands there", shown(kind, _MAX_SHOWN)
    )
    return f"[{kind[:_MAX_SHOWN].removeprefix('input_').removesuffix('_url')} omitted]"


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be {{'id', 'type': 'function', 'function': {{'name'}}}}", param="messages")
    return {**call, "function": dict(function)}
