"""From the choices of a chat, whole or in chunks, to the items and events of a response, and the response around them.

::

    created, in_progress
    per item:   output_item.added, content_part.added, deltas ..., done, content_part.done, output_item.done
    completed | incomplete | failed

One item is open at a time: reasoning, then text, then calls, in the order in which the chat brings them.  Each item
makes the events of its own life; the writer numbers them.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.requests import PreparedAnswer
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.tools import CallableTool, ResponseTools, custom_input

_LAST_EVENT = {"completed": "response.completed", "failed": "response.failed"}


# By the finish reason of the chat: the response's status, and why it is incomplete.
_STATUS: Mapping[str, tuple[str, str | None]] = {
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """The fields of a response that its request fixes; the answer and all its events share them."""

    response_id: str
    created: int
    model: str
    body: ResponsesBody
    temperature: float
    top_p: float
    tools: ResponseTools

    @classmethod
    def of(cls, body: ResponsesBody, prepared: PreparedAnswer, tools: ResponseTools) -> ResponseShape:
        """Return the shape for ``body`` and its prepared chat; the ids of the two differ only in the prefix."""
        params = prepared.requests[0].params
        return cls(
            response_id=f"resp_{prepared.shape.response_id.removeprefix('chatcmpl-')}",
            created=prepared.shape.created,
            model=prepared.shape.model,
            body=body,
            temperature=params.temperature,
            top_p=params.top_p,
            tools=tools,
        )

    def running(self) -> JsonObject:
        """Return the response before its first item."""
        return self._response("in_progress", [], None)

    def finished(self, items: list[JsonObject], finish_reason: str | None, usage: Mapping[str, Any]) -> JsonObject:
        """Return the response at its end; ``finish_reason`` and ``usage`` are the chat's."""
        status, reason = _STATUS.get(finish_reason or "", ("completed", None))
        response = self._response(status, items, response_usage(usage))
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            response["completed_at"] = int(time.time())
        return response

    def failed(self, items: list[JsonObject], message: str) -> JsonObject:
        """Return the response after an error that came after its first event."""
        return self._response("failed", items, None) | {"error": {"code": "server_error", "message": message}}

    def _response(self, status: str, items: list[JsonObject], usage: JsonObject | None) -> JsonObject:
        body = self.body
        text: JsonObject = {"format": (body.text and body.text.format) or {"type": "text"}}
        if body.text is not None and body.text.verbosity is not None:
            text["verbosity"] = body.text.verbosity
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": items,
            "usage": usage,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "text": text,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "service_tier": "default",
            "store": False,
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }


def response_usage(usage: Mapping[str, Any]) -> JsonObject:
    """Return the ``usage`` of a chat, under the names of the Responses API."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    completion_details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt_details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion_details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def whole_response(shape: ResponseShape, chat: Mapping[str, Any]) -> JsonObject:
    """Return the response for the whole chat answer ``chat``."""
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

    def begin(self, _usage: Mapping[str, Any]) -> list[JsonObject]:
        """Return the events before the first item."""
        names = ("response.created", "response.in_progress")
        return self._numbered({"type": name, "response": self._shape.running()} for name in names)

    def take(self, choice: Mapping[str, Any]) -> list[JsonObject]:
        """Return the events of a choice of a chunk; its ``delta`` may have reasoning, content and tool calls."""
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
        """Return the last events, with the chat's ``usage``; an empty answer gets an empty message."""
        events = [] if self._items or self._open else self._switch(MessageItem())
        if isinstance(self._open, MessageItem):
            self._open.add("", self._logprobs)
        events += self._close("incomplete" if self._finish_reason in ("length", "abort") else "completed")
        response = self._shape.finished(self._items, self._finish_reason, usage)
        name = _LAST_EVENT.get(response["status"], "response.incomplete")
        return self._numbered([*events, {"type": name, "response": response}])

    def fail(self, _status: int, message: str) -> list[JsonObject]:
        """Return the last event after an error that came after ``begin``."""
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
            events = self._switch(CallItem(call_id, tool))
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


class OutputItem(ABC):
    """One item, whose text or arguments grow; its events lack only their place in the response."""

    id_prefix: str

    def __init__(self) -> None:
        self.item_id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def opened(self) -> list[JsonObject]:
        """Begin the item, empty."""
        return [{"type": "response.output_item.added", "item": self.json("in_progress")}]

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        """Add to the text; a message keeps the log-probabilities."""
        self._pieces.append(text)
        return [self._delta(text)] if text else []

    @abstractmethod
    def _delta(self, text: str) -> JsonObject:
        """Return the event of more text."""

    @abstractmethod
    def closed(self) -> list[JsonObject]:
        """End the text."""

    @abstractmethod
    def json(self, status: str) -> JsonObject:
        """Return the item as it stands."""


class TextItem(OutputItem):
    """What messages and reasoning share: one content part whose text grows."""

    part_type: str
    event_prefix: str

    def opened(self) -> list[JsonObject]:
        (added,) = super().opened()
        part = {"item_id": self.item_id, "content_index": 0, "part": self._part()}
        return [added | {"item": added["item"] | {"content": []}}, {"type": "response.content_part.added", **part}]

    def closed(self) -> list[JsonObject]:
        part = self._part()
        return [
            self._event("done", {"text": part["text"]}),
            {"type": "response.content_part.done", "item_id": self.item_id, "content_index": 0, "part": part},
        ]

    def _delta(self, text: str) -> JsonObject:
        return self._event("delta", {"delta": text})

    def _part(self) -> JsonObject:
        return {"type": self.part_type, "text": self._text}

    def _event(self, name: str, fields: JsonObject) -> JsonObject:
        return {"type": f"{self.event_prefix}.{name}", "item_id": self.item_id, "content_index": 0, **fields}


class ReasoningItem(TextItem):
    """The reasoning before the answer."""

    id_prefix, part_type, event_prefix = "rs", "reasoning_text", "response.reasoning_text"

    def json(self, status: str) -> JsonObject:
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
        self._logprobs += logprobs
        events = super().add(text)
        for delta in events:
            delta["logprobs"] = self._logprobs[self._num_shown_logprobs :]
            self._num_shown_logprobs = len(self._logprobs)
        return events

    def closed(self) -> list[JsonObject]:
        text_done, part_done = super().closed()
        return [text_done | {"logprobs": self._logprobs}, part_done]

    def json(self, status: str) -> JsonObject:
        item = {"id": self.item_id, "type": "message", "role": "assistant", "content": [self._part()]}
        return item | {"status": status}

    def _part(self) -> JsonObject:
        return super()._part() | {"annotations": [], "logprobs": list(self._logprobs)}


class CallItem(OutputItem):
    """A call of one of the client's tools, whose arguments grow.

    The text of a custom tool comes whole at the end: before, it is a piece of JSON.
    """

    def __init__(self, call_id: str, tool: CallableTool) -> None:
        self.id_prefix = "ctc" if tool.is_custom else "fc"
        super().__init__()
        self._call_id = call_id
        self._tool = tool

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
        events = super().add(text)
        return [] if self._tool.is_custom else events

    def _delta(self, text: str) -> JsonObject:
        kind = "custom_tool_call_input" if self._tool.is_custom else "function_call_arguments"
        return {"type": f"response.{kind}.delta", "item_id": self.item_id, "delta": text}

    def closed(self) -> list[JsonObject]:
        if self._tool.is_custom:
            text, kind = custom_input(self._text), "response.custom_tool_call_input.done"
            deltas = [self._delta(text)] if text else []
            return [*deltas, {"type": kind, "item_id": self.item_id, "input": text}]
        done = {"type": "response.function_call_arguments.done", "item_id": self.item_id, "name": self._tool.name}
        return [done | {"arguments": self._text}]

    def json(self, status: str) -> JsonObject:
        kind = "custom_tool_call" if self._tool.is_custom else "function_call"
        item = {"id": self.item_id, "type": kind, "call_id": self._call_id, "name": self._tool.name}
        if self._tool.namespace is not None:
            item |= {"namespace": self._tool.namespace}
        given = {"input": custom_input(self._text)} if self._tool.is_custom else {"arguments": self._text}
        return item | given | {"status": status}
