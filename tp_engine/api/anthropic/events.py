"""From the choices of a chat to the blocks and events of a message.

::

    message_start
    per block:   content_block_start, content_block_delta ..., content_block_stop
    message_delta, message_stop
    error        instead of the last two, after a failure
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tp_engine.api.anthropic.protocol import MessagesBody, anthropic_error
from tp_engine.api.openai.chat_events import Call, ChatEventWriter, JsonObject
from tp_engine.api.openai.requests import PreparedAnswer
from tp_engine.api.openai.tools.events import unread_arguments

# Each kind of item: its block as it begins, and the type of its deltas and the field of these that has the text.
_BLOCKS: Mapping[str, tuple[JsonObject, str, str]] = {
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "content": ({"type": "text", "text": ""}, "text_delta", "text"),
    "call": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessageWriter(ChatEventWriter):
    """Turns the choices of the prepared ``chat`` into the events of the message that answers ``body``; the ids of the
    two differ only in the prefix."""

    call_prefix = "toolu"

    def __init__(self, body: MessagesBody, chat: PreparedAnswer) -> None:
        super().__init__()
        name = chat.shape.response_id.removeprefix("chatcmpl-")
        self._fixed = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": chat.shape.model}
        self._stop_sequences = body.stop_sequences or ()
        self._ending: JsonObject = {"stop_reason": None, "stop_sequence": None}
        self._block: JsonObject = {}  # the open one, as it began
        self._pieces: list[str] = []
        self._ends_in_call = False  # whose arguments are no object

    def begin(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        return [{"type": "message_start", "message": self._whole([], usage)}]

    def ping(self) -> list[JsonObject]:
        return [{"type": "ping"}]

    def fail(self, status: int, message: str) -> list[JsonObject]:
        return [anthropic_error(status, message)]

    def _open(self, kind: str, call: Call) -> list[JsonObject]:
        call_fields = {"id": call[0], "name": call[1]} if kind == "call" else {}
        self._block, self._pieces = {**_BLOCKS[kind][0], **call_fields}, []
        return [{"type": "content_block_start", "index": len(self.items), "content_block": self._block}]

    def _add(self, text: str) -> list[JsonObject]:
        self._pieces.append(text)
        _, name, field = _BLOCKS[self.kind or ""]
        return [{"type": "content_block_delta", "index": len(self.items), "delta": {"type": name, field: text}}]

    def _done(self, *, is_last: bool) -> tuple[JsonObject, list[JsonObject]]:
        text = "".join(self._pieces)
        arguments = _arguments(text) if self.kind == "call" else None
        self._ends_in_call = self.kind == "call" and arguments is None
        if self.kind == "call":
            grown: JsonObject = {"input": unread_arguments(text) if arguments is None else arguments}
        else:
            grown = {self._block["type"]: text}
        return self._block | grown, [{"type": "content_block_stop", "index": len(self.items)}]

    def _end(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        reason, stop = self.last.get("finish_reason"), self.last.get("stop_reason")
        if stop in self._stop_sequences and (reason == "stop" or self._ends_in_call):
            self._ending = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            has_calls = reason == "stop" and any(block["type"] == "tool_use" for block in self.items)
            name = "tool_use" if has_calls else _STOP_REASONS.get(reason or "", "end_turn")
            self._ending = {"stop_reason": name, "stop_sequence": None}
        ending = {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}
        return [ending, {"type": "message_stop"}]

    def _whole(self, events: list[JsonObject], usage: Mapping[str, Any]) -> JsonObject:
        return {**self._fixed, "content": list(self.items), **self._ending, "usage": _usage(usage)}


def _usage(usage: Mapping[str, Any]) -> JsonObject:
    """The ``usage`` of a chat, under the names of the Messages API: cached tokens are counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _arguments(text: str) -> JsonObject | None:
    """The object that arguments are, empty for none; None for a text that was cut off, or that is no object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return {} if found is None else found if isinstance(found, dict) else None
