"""From the choices of a chat, whole or in chunks, to the items and events of a response.

::

    created, in_progress
    per item:   output_item.added, content_part.added, deltas ..., done, content_part.done, output_item.done
    completed | incomplete | failed

One item is open at a time: reasoning, then text, then calls, in the order in which the chat brings them.  Each item
makes the events of its own life; the writer numbers them.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.responses_api.shape import ResponseShape
from tp_engine.api.openai.responses_api.tools import CallableTool, custom_input

_LAST_EVENT = {"completed": "response.completed", "failed": "response.failed"}


def whole_response(shape: ResponseShape, chat: Mapping[str, Any]) -> JsonObject:
    """The response for the whole chat answer ``chat``."""
    writer = ResponseWriter(shape)
    choice = chat["choices"][0]
    writer.take(choice | {"delta": choice["message"]})
    return writer.finish(chat["usage"])[-1]["response"]  # type: ignore[no-any-return]


class ResponseWriter:
    """Turns the choices of one chat into the events of one response, each with its ``sequence_number``."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._items: list[JsonObject] = []  # those that are done
        self._open: OutputItem | None = None
        self._call_index: int | None = None  # which of the chat's tool calls is open
        self._logprobs: list[Mapping[str, Any]] = []  # of tokens whose text has not come yet
        self._finish_reason: str | None = None
        self._num_events = 0

    def begin(self) -> list[JsonObject]:
        """The events before the first item."""
        names = ("response.created", "response.in_progress")
        return self._numbered({"type": name, "response": self._shape.running()} for name in names)

    def take(self, choice: Mapping[str, Any]) -> list[JsonObject]:
        """The events of a choice of a chunk; its ``delta`` may have reasoning, content and tool calls."""
        delta = choice["delta"]
        self._logprobs += (choice.get("logprobs") or {}).get("content") or []
        events: list[JsonObject] = []
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._grow(ReasoningItem, thought)
        if content := delta.get("content"):
            events += self._grow(MessageItem, content, self._logprobs)
            self._logprobs = []
        for number, call in enumerate(delta.get("tool_calls") or ()):
            events += self._call(number, call)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return self._numbered(events)

    def finish(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """The last events, with the chat's ``usage``; an empty answer gets an empty message."""
        events = [] if self._items or self._open else self._switch(MessageItem())
        if isinstance(self._open, MessageItem):
            self._open.add("", self._logprobs)
        events += self._close("incomplete" if self._finish_reason in ("length", "abort") else "completed")
        response = self._shape.finished(self._items, self._finish_reason, usage)
        name = _LAST_EVENT.get(response["status"], "response.incomplete")
        return self._numbered([*events, {"type": name, "response": response}])

    def fail(self, message: str) -> list[JsonObject]:
        """The last event after an error that came after ``begin``."""
        if self._open is not None:
            self._items.append(self._open.json("incomplete"))
        response = self._shape.failed(self._items, message)
        return self._numbered([{"type": "response.failed", "response": response}])

    def _grow(
        self, kind: type[ReasoningItem | MessageItem], text: str, logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> list[JsonObject]:
        events = [] if isinstance(self._open, kind) else self._switch(kind())
        assert self._open is not None
        return events + self._placed(self._open.add(text, logprobs))

    def _call(self, number: int, call: Mapping[str, Any]) -> list[JsonObject]:
        """A piece of a tool call; one with a new index is a new call."""
        function, index = call.get("function") or {}, call.get("index", number)
        events: list[JsonObject] = []
        if not isinstance(self._open, CallItem) or index != self._call_index:
            call_id = call.get("id") or f"call_{uuid.uuid4().hex}"
            tool = self._shape.tools.called(function.get("name") or "")
            events = self._switch((CustomCallItem if tool.is_custom else FunctionCallItem)(call_id, tool))
            self._call_index = index
        assert self._open is not None
        return events + self._placed(self._open.add(function.get("arguments") or ""))

    def _switch(self, item: OutputItem) -> list[JsonObject]:
        events = self._close("completed")
        self._open = item
        return events + self._placed(item.opened())

    def _close(self, status: str) -> list[JsonObject]:
        if self._open is None:
            return []
        item = self._open.json(status)
        events = self._placed([*self._open.closed(), {"type": "response.output_item.done", "item": item}])
        self._items.append(item)
        self._open = None
        return events

    def _placed(self, events: Iterable[JsonObject]) -> list[JsonObject]:
        return [one | {"output_index": len(self._items)} for one in events]

    def _numbered(self, events: Iterable[JsonObject]) -> list[JsonObject]:
        numbered = [one | {"sequence_number": number} for number, one in enumerate(events, start=self._num_events)]
        self._num_events += len(numbered)
        return numbered


class OutputItem(Protocol):
    """One item; its events lack only their place in the response."""

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
        """The text grows; a message keeps the log-probabilities."""
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
    """The reasoning before the answer."""

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


class CallItem(ABC):
    """A call of one of the client's tools, whose arguments grow."""

    id_prefix: str

    def __init__(self, call_id: str, tool: CallableTool) -> None:
        self.item_id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._tool = tool
        self._pieces: list[str] = []

    @property
    def _arguments(self) -> str:
        return "".join(self._pieces)

    def opened(self) -> list[JsonObject]:
        """The item appears, without arguments."""
        return [{"type": "response.output_item.added", "item": self.json("in_progress")}]

    @abstractmethod
    def json(self, status: str) -> JsonObject:
        """The item as it stands."""

    def _item(self, kind: str) -> JsonObject:
        item = {"id": self.item_id, "type": kind, "call_id": self._call_id, "name": self._tool.name}
        return item if self._tool.namespace is None else item | {"namespace": self._tool.namespace}


class FunctionCallItem(CallItem):
    """A call of a function."""

    id_prefix = "fc"

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """The arguments grow."""
        if not text:
            return []
        self._pieces.append(text)
        return [{"type": "response.function_call_arguments.delta", "item_id": self.item_id, "delta": text}]

    def closed(self) -> list[JsonObject]:
        """The arguments are complete."""
        done = {"type": "response.function_call_arguments.done", "item_id": self.item_id, "name": self._tool.name}
        return [done | {"arguments": self._arguments}]

    def json(self, status: str) -> JsonObject:
        """The item as it stands."""
        return self._item("function_call") | {"arguments": self._arguments, "status": status}


class CustomCallItem(CallItem):
    """A call of a custom tool.  Its text comes whole at the end: before, it is a piece of JSON."""

    id_prefix = "ctc"

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """The arguments grow."""
        self._pieces.append(text)
        return []

    def closed(self) -> list[JsonObject]:
        """The text is complete."""
        text, kind = custom_input(self._arguments), "response.custom_tool_call_input"
        deltas = [{"type": f"{kind}.delta", "item_id": self.item_id, "delta": text}] if text else []
        return [*deltas, {"type": f"{kind}.done", "item_id": self.item_id, "input": text}]

    def json(self, status: str) -> JsonObject:
        """The item as it stands."""
        return self._item("custom_tool_call") | {"input": custom_input(self._arguments), "status": status}
