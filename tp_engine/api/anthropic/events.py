"""From the choices of a chat, whole or in chunks, to the blocks and events of a message.

::

    message_start
    per block:   content_block_start, content_block_delta ..., content_block_stop
    message_delta, message_stop
    error        instead of the last two, after a failure

One block is open at a time: thinking, then text, then calls, in the order in which the chat brings them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.api.anthropic.protocol import MessagesBody, anthropic_error
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.requests import PreparedAnswer

# Each kind of block: as it begins, and the name of the field that grows, in the block and in its deltas.
_EMPTY: Mapping[str, JsonObject] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "tool_use": {"type": "tool_use", "input": {}},
}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """The fields of a message that its request fixes."""

    message_id: str
    model: str
    stop_sequences: tuple[str, ...]

    @classmethod
    def of(cls, body: MessagesBody, chat: PreparedAnswer) -> MessageShape:
        """Return the shape for ``body`` and its prepared chat; the ids of the two differ only in the prefix."""
        name = chat.shape.response_id.removeprefix("chatcmpl-")
        return cls(message_id=f"msg_{name}", model=chat.shape.model, stop_sequences=tuple(body.stop_sequences or ()))

    def message(self, blocks: list[JsonObject], end: JsonObject, usage: Mapping[str, Any]) -> JsonObject:
        """Return the message; ``end`` has its ``stop_reason`` and ``stop_sequence``, ``usage`` is the chat's."""
        fixed = {"id": self.message_id, "type": "message", "role": "assistant", "model": self.model}
        return {**fixed, "content": blocks, **end, "usage": message_usage(usage)}


def message_usage(usage: Mapping[str, Any]) -> JsonObject:
    """Return the ``usage`` of a chat, under the names of the Messages API: cached tokens are counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def whole_message(shape: MessageShape, chat: Mapping[str, Any]) -> JsonObject:
    """Return the message for the whole chat answer ``chat``."""
    writer, choice = MessageWriter(shape), chat["choices"][0]
    writer.take(choice | {"delta": choice["message"]})
    writer.finish(chat["usage"])
    return shape.message(writer.blocks, writer.end, chat["usage"])


class MessageWriter:
    """Turns the choices of one chat into the events of one message.

    ``blocks`` are those that are done; after ``finish``, ``end`` tells why the message ended.
    """

    def __init__(self, shape: MessageShape) -> None:
        self.blocks: list[JsonObject] = []
        self.end: JsonObject = {"stop_reason": None, "stop_sequence": None}
        self._shape = shape
        self._open: JsonObject | None = None
        self._pieces: list[str] = []  # of the open block
        self._call_index: int | None = None  # which of the chat's tool calls is open
        self._last: Mapping[str, Any] = {}  # the chat's finish_reason and stop_reason

    def begin(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """Return the event before the first block."""
        return [{"type": "message_start", "message": self._shape.message([], self.end, usage)}]

    def take(self, choice: Mapping[str, Any]) -> list[JsonObject]:
        """Return the events of a choice of a chunk; its ``delta`` may have reasoning, content and tool calls."""
        delta = choice["delta"]
        events: list[JsonObject] = []
        for kind, text in (("thinking", delta.get("reasoning_content")), ("text", delta.get("content"))):
            if text:
                events += self._grow(kind, text)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            events += self._call(number, call)
        if choice.get("finish_reason"):
            self._last = choice
        return events

    def finish(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """Return the last events, with the chat's ``usage``; an empty answer gets an empty text."""
        events = [] if self.blocks or self._open is not None else self._begin_block("text", {})
        events += self._close()
        self.end = self._ending()
        ending = {"type": "message_delta", "delta": self.end, "usage": message_usage(usage)}
        return [*events, ending, {"type": "message_stop"}]

    def fail(self, status: int, message: str) -> list[JsonObject]:
        """Return the last event after an error that came after ``begin``."""
        return [anthropic_error(status, message)]

    def _ending(self) -> JsonObject:
        reason, stop = self._last.get("finish_reason"), self._last.get("stop_reason")
        if reason == "stop" and stop in self._shape.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        has_calls = reason == "stop" and any(block["type"] == "tool_use" for block in self.blocks)
        return {
            "stop_reason": "tool_use" if has_calls else _STOP_REASONS.get(reason or "", "end_turn"),
            "stop_sequence": None,
        }

    def _grow(self, kind: str, text: str) -> list[JsonObject]:
        is_open = self._open is not None and self._open["type"] == kind
        events = [] if is_open else self._begin_block(kind, {})
        name, key = _DELTAS[kind]
        return [*events, self._delta(text, {"type": name, key: text})]

    def _call(self, number: int, call: Mapping[str, Any]) -> list[JsonObject]:
        """A piece of a tool call; one with a new index is a new call."""
        function, index = call.get("function") or {}, call.get("index", number)
        events: list[JsonObject] = []
        if self._open is None or self._open["type"] != "tool_use" or index != self._call_index:
            name, call_id = function.get("name") or "", call.get("id") or f"toolu_{uuid.uuid4().hex[:24]}"
            events = self._begin_block("tool_use", {"id": call_id, "name": name})
            self._call_index = index
        if text := function.get("arguments"):
            events.append(self._delta(text, {"type": "input_json_delta", "partial_json": text}))
        return events

    def _delta(self, text: str, delta: JsonObject) -> JsonObject:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def _begin_block(self, kind: str, fields: JsonObject) -> list[JsonObject]:
        events = self._close()
        self._open = {**_EMPTY[kind], **fields}
        return [*events, {"type": "content_block_start", "index": len(self.blocks), "content_block": self._open}]

    def _close(self) -> list[JsonObject]:
        if self._open is None:
            return []
        block, text = self._open, "".join(self._pieces)
        grown = {"input": _arguments(text)} if block["type"] == "tool_use" else {block["type"]: text}
        self.blocks.append(block | grown)
        self._open, self._pieces = None, []
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _arguments(text: str) -> JsonObject:
    """The object that arguments are; empty for a text that a limit cut off, or that is no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
