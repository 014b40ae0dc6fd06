"""One spelling for what clients spell in several ways: a conversation may have begun with another server.

| in a message | becomes |
| --- | --- |
| ``reasoning``, ``thinking``, ``reasoning_text`` (Copilot), ``tool_plan`` (Cohere) | ``reasoning_content`` |
| ``thinking_blocks`` (LiteLLM), ``reasoning_details`` (OpenRouter) | the same |
| parts of the content with the type thinking or reasoning | the same |
| reasoning that only the server that wrote it can read | nothing; the log says so |
| fields of ``provider_specific_fields`` (LiteLLM) that the message itself lacks | its own |
| ``refusal``, or an audio's transcript, without a content | the content |
| ``function_call``, and an answer with the role function | ``tool_calls``, and an answer with the role tool |
| null as the content of an answer of a tool, which had nothing to say | an empty text |
| an audio stored by OpenAI's servers; ``prefix``, ``partial`` of the last message | 400 |
| ``UNTOLD``: notes for the client, or about the text | nothing |

Other fields reach the template, which may know them; the log names them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tp_engine.errors import RequestError, shown
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "tool_plan")
_LISTS = ("thinking_blocks", "reasoning_details")
# By type of part: the fields that may have its text; none: no other server can read it.
_THOUGHTS: Mapping[object, tuple[str, ...]] = {
    "thinking": ("thinking",),
    "reasoning": ("text", "reasoning", "summary"),
    "reasoning.text": ("text",),
    "reasoning.summary": ("summary",),
    "redacted_thinking": (),
    "reasoning.encrypted": (),
}


_OF_PROVIDERS = "provider_specific_fields"
# Fields that the model need not see: sources of a search, notes of the client or a gateway.
UNTOLD = frozenset(
    {
        "annotations", "cache_control", "citations", "created", "created_at", "finish_reason", "id", "logprobs",
        "model", "object", "phase", "reasoning_opaque", "reasoning_signature", "search_results", "status",
        "stop_reason", "timestamp", "usage", "weight",
    }
)  # fmt: skip
_TOLD = frozenset(
    {
        *_FIELDS,
        *_LISTS,
        "role",
        "content",
        "name",
        "images",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "prefix",
        "partial",
    }
)


def is_thought(part: object) -> bool:
    """Whether a part of a content is reasoning."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _THOUGHTS


def in_one_spelling(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message without null fields; raises ``RequestError`` for reasoning that is not text."""
    others = message.get(_OF_PROVIDERS)
    whole = {**others, **message} if isinstance(others, Mapping) else message
    given = {name: value for name, value in whole.items() if value is not None and name != _OF_PROVIDERS}
    role = given.get("role")
    if role == "assistant":
        if said := _said(where, given.pop("audio", None)):
            given.setdefault("content", said)
        if thought := _reasoning(where, given):
            given["reasoning_content"] = thought
        if isinstance(given.get("refusal"), str):
            given.setdefault("content", given["refusal"])
        function = given.pop("function_call", None)
        if isinstance(function, Mapping) and not given.get("tool_calls"):
            given["tool_calls"] = [{"id": _function_id(function), "type": "function", "function": function}]
    elif role == "function":
        given |= {"role": "tool", "tool_call_id": _function_id(given)}
    if given.get("role") == "tool" and "content" in message:
        given.setdefault("content", "")
    for name in given.keys() - _TOLD - UNTOLD:
        if given[name] not in (False, "", [], {}):
            warn_once(logger, "messages have the field %s, which only a template that knows it reads", shown(name))
    return given


def check_ending(message: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` if the last message asks to be continued in the words of Mistral and DeepSeek, or Kimi."""
    for name in ("prefix", "partial"):
        if message.get(name) not in (None, False):
            raise RequestError(
                f"the last message has {name} {shown(message[name], 60)}; to let the model continue it, set "
                "continue_final_message to true and add_generation_prompt to false",
                param="messages",
            )


def _said(where: str, audio: object) -> str:
    """The transcript of an earlier answer's audio, empty for none."""
    said = audio.get("transcript") if isinstance(audio, Mapping) else None
    if audio and not isinstance(said, str):
        raise RequestError(
            f"{where}.audio is {shown(audio, 60)}; this server keeps no audio: send its transcript as the content",
            param="messages",
        )
    return said or ""


def _function_id(named: Mapping[str, Any]) -> str:
    """The id of a call that has none: there is one at a time, and its answer has the name."""
    return f"call_{named.get('name')}"


def _reasoning(where: str, message: Mapping[str, Any]) -> str:
    """The first spelling that has any text; clients send one reasoning in several."""
    for field in _FIELDS:
        text = message.get(field)
        if isinstance(text, str) and text:
            return text
        if text and field != "thinking":  # a switch in other APIs
            raise RequestError(f"{where}.{field} is {shown(text, 60)}; it must be text", param="messages")
    for parts in (*map(message.get, _LISTS), message.get("content")):
        if text := _texts(parts):
            return text
    return ""


def _texts(parts: object) -> str:
    """The reasoning of a list of parts, which may be lists of parts themselves."""
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        return ""
    return "".join(_thought(part) for part in parts if is_thought(part))


def _thought(part: Mapping[str, Any]) -> str:
    kind = part["type"]
    fields = _THOUGHTS[kind]
    if not fields:
        warn_once(logger, "reasoning of the type %s is left out: only the server that made it can read it", kind)
    for field in fields:
        value = part.get(field)
        pieces = value if isinstance(value, (list, tuple)) else [value]
        texts = [piece.get("text") if isinstance(piece, Mapping) else piece for piece in pieces]
        if text := "".join(one for one in texts if isinstance(one, str)):
            return text
    return ""
