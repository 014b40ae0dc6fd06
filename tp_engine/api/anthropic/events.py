"""From the choices of a chat to the blocks and events of a message.

::

    message_start
    per block:   content_block_start, content_block_delta ..., content_block_stop
    message_delta, message_stop
    error        instead of the last two, after a failure; instead of the last, after an abort
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tp_engine.api.anthropic.protocol import MessagesBody, anthropic_error
from tp_engine.api.openai.chat_events import Call, ChatEventWriter, JsonObject
from tp_engine.api.openai.protocol import Thinking
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.requests import PreparedAnswer
from tp_engine.api.openai.tools.events import unread_arguments

# By kind of item: its block as it begins, the type of its deltas, and their field that has the text.
_BLOCKS: Mapping[str, tuple[JsonObject, str, str]] = {
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "content": ({"type": "text", "text": ""}, "text_delta", "text"),
    "call": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": None}
_ABORTED = "the answer was aborted before its end; send the request again"


class MessageWriter(ChatEventWriter):
    """Turns the choices of the prepared ``chat`` into the events of the message that answers ``body``; the ids of the
    two differ only in the prefix."""

    call_prefix = "toolu"

    def __init__(self, body: MessagesBody, chat: PreparedAnswer, seal: ReasoningSeal) -> None:
        super().__init__()
        self._seal = seal
        self._omits_thinking = isinstance(body.thinking, Thinking) and body.thinking.display == "omitted"
        name = chat.shape.response_id.removeprefix("chatcmpl-")
        self._fixed = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": chat.shape.model}
        self._stop_sequences = body.stop_sequences or ()
        self._ending: JsonObject = {"stop_reason": None, "stop_sequence": None}
        self._block: JsonObject = {}  # the open one, as it began
        self._pieces: list[str] = []
        self._ends_in_call = False  # with arguments that are not an object

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
        return [] if self.kind == "reasoning" and self._omits_thinking else self._delta({"type": name, field: text})

    def _delta(self, delta: JsonObject) -> list[JsonObject]:
        return [{"type": "content_block_delta", "index": len(self.items), "delta": delta}]

    def _done(self, *, is_last: bool) -> tuple[JsonObject, list[JsonObject]]:
        text = "".join(self._pieces)
        signed: list[JsonObject] = []
        arguments = _arguments(text) if self.kind == "call" else None
        self._ends_in_call = self.kind == "call" and arguments is None
        if self.kind == "call":
            grown: JsonObject = {"input": unread_arguments(text) if arguments is None else arguments}
        elif self.kind == "reasoning":
            grown, signed = self._thinking(text)
        else:
            grown = {self._block["type"]: text}
        return self._block | grown, [*signed, {"type": "content_block_stop", "index": len(self.items)}]

    def _thinking(self, text: str) -> tuple[JsonObject, list[JsonObject]]:
        """The fields of a block of thinking, and the event of its signature: clients send back what is signed, as
        thinking.  The signature of thinking that is not shown has the text, sealed."""
        sealed = self._seal.sealed(text) if self._omits_thinking else self._seal.signature(text)
        grown = {"thinking": "" if self._omits_thinking else text, "signature": sealed}
        return grown, self._delta({"type": "signature_delta", "signature": sealed})

    def _end(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        reason, stop = self.last.get("finish_reason"), self.last.get("stop_reason")
        if stop in self._stop_sequences and (reason == "stop" or self._ends_in_call):
            self._ending = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            has_calls = reason == "stop" and any(block["type"] == "tool_use" for block in self.items)
            name = "tool_use" if has_calls else _STOP_REASONS.get(reason or "", "end_turn")
            self._ending = {"stop_reason": name, "stop_sequence": None}
        ending = {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}
        # whatever the stop reason, an agent would take half an answer for the whole
        last = anthropic_error(500, _ABORTED) if reason == "abort" else {"type": "message_stop"}
        return [ending, last]

    def _whole(self, events: list[JsonObject], usage: Mapping[str, Any]) -> JsonObject:
        return {**self._fixed, "content": list(self.items), **self._ending, "usage": _usage(usage)}


def _usage(usage: Mapping[str, Any]) -> JsonObject:
    """The ``usage`` of a chat, under the names of the Messages API, which counts cached tokens apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    details = {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **details,
    }


def _arguments(text: str) -> JsonObject | None:
    """The arguments as an object, empty without any; None for text that was cut off, or that is not an object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return {} if found is None else found if isinstance(found, dict) else None
