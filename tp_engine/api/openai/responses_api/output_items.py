"""The output items of a response, while they grow: a message, reasoning, or a function call.

Each makes the events of its own life; the caller numbers them.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tp_engine.api.openai.responses import JsonObject


class OutputItem(Protocol):
    """One item; events lack only their place in the response."""

    def opened(self) -> list[JsonObject]: ...
    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]: ...
    def closed(self) -> list[JsonObject]: ...
    def json(self, status: str) -> JsonObject: ...


class TextItem(ABC):
    """What messages and reasoning share: one content part whose text grows."""

    id_prefix: str
    part_type: str
    event_prefix: str

    def __init__(self) -> None:
        self.item_id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []

    def opened(self) -> list[JsonObject]:
        """The item and its part appear, empty."""
        item = self.json("in_progress") | {"content": []}
        return [
            {"type": "response.output_item.added", "item": item},
            {"type": "response.content_part.added", "item_id": self.item_id, "content_index": 0, "part": self._part()},
        ]

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """The text grows; log-probabilities are kept where an item shows them."""
        if not text:
            return []
        self._pieces.append(text)
        return [self._event("delta", {"delta": text})]

    def closed(self) -> list[JsonObject]:
        """The text and the part are complete."""
        part = self._part()
        return [
            self._event("done", {"text": part["text"]}),
            {"type": "response.content_part.done", "item_id": self.item_id, "content_index": 0, "part": part},
        ]

    @abstractmethod
    def json(self, status: str) -> JsonObject:
        """The item as it stands."""

    def _part(self) -> JsonObject:
        return {"type": self.part_type, "text": "".join(self._pieces)}

    def _event(self, name: str, fields: JsonObject) -> JsonObject:
        return {"type": f"{self.event_prefix}.{name}", "item_id": self.item_id, "content_index": 0, **fields}


class ReasoningItem(TextItem):
    """What the model thought before it answered."""

    id_prefix, part_type, event_prefix = "rs", "reasoning_text", "response.reasoning_text"

    def json(self, status: str) -> JsonObject:
        """The item as it stands."""
        item = {"id": self.item_id, "type": "reasoning", "summary": [], "content": [self._part()]}
        return item | {"encrypted_content": None, "status": status}


class MessageItem(TextItem):
    """The text of the answer, with its log-probabilities."""

    id_prefix, part_type, event_prefix = "msg", "output_text", "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Mapping[str, Any]] = []
        self._num_shown_logprobs = 0

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """The text grows."""
        self._logprobs += logprobs
        events = super().add(text)
        for delta in events:
            delta["logprobs"] = self._logprobs[self._num_shown_logprobs :]
            self._num_shown_logprobs = len(self._logprobs)
        return events

    def closed(self) -> list[JsonObject]:
        """The text and the part are complete."""
        text_done, part_done = super().closed()
        return [text_done | {"logprobs": self._logprobs}, part_done]

    def json(self, status: str) -> JsonObject:
        """The item as it stands."""
        item = {"id": self.item_id, "type": "message", "role": "assistant", "content": [self._part()]}
        return item | {"status": status}

    def _part(self) -> JsonObject:
        return super()._part() | {"annotations": [], "logprobs": list(self._logprobs)}


class FunctionCallItem:
    """A call of one of the client's functions, whose arguments grow."""

    def __init__(self, call_id: str, name: str) -> None:
        self.item_id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def opened(self) -> list[JsonObject]:
        """The item appears, without arguments."""
        return [{"type": "response.output_item.added", "item": self.json("in_progress")}]

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """The arguments grow."""
        if not text:
            return []
        self._pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", "item_id": self.item_id, "delta": text}]

    def closed(self) -> list[JsonObject]:
        """The arguments are complete."""
        done = {"type": "response.function_call_arguments.done", "item_id": self.item_id, "name": self._name}
        return [done | {"arguments": "".join(self._pieces)}]

    def json(self, status: str) -> JsonObject:
        """The item as it stands."""
        item = {"id": self.item_id, "type": "function_call", "call_id": self._call_id, "name": self._name}
        return item | {"arguments": "".join(self._pieces), "status": status}
