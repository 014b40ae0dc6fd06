"""From the choices of a chat to the items and events of a response, and the response around them.

::

    created, in_progress
    per item:   output_item.added, content_part.added, deltas ..., done, content_part.done, output_item.done
    completed | incomplete | failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from tp_engine.api.openai.chat_events import Call, ChatEventWriter, JsonObject
from tp_engine.api.openai.reasoning_seal import ReasoningSeal
from tp_engine.api.openai.requests import PreparedAnswer
from tp_engine.api.openai.responses_api.client_tools import ClientTool
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.tools import CallableTool, ResponseTools, custom_input

_LAST_EVENT = {"completed": "response.completed", "failed": "response.failed"}
# By the finish reason of the chat: the response's status, and why it is incomplete.
_STATUS: Mapping[str, tuple[str, str | None]] = {
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}
# The type of an item -> the prefix of its id, and the middle of the names of its events; a call has no parts.
_ITEMS = {
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
    "custom_tool_call": ("ctc", "custom_tool_call_input"),
}


class ResponseWriter(ChatEventWriter):
    """Turns the choices of the prepared ``chat`` into the events of the response to ``body``, each with its
    ``sequence_number``; the ids of the two differ only in the prefix."""

    call_prefix = "call"

    def __init__(self, body: ResponsesBody, chat: PreparedAnswer, tools: ResponseTools, seal: ReasoningSeal) -> None:
        super().__init__()
        self._tools = tools
        self._seal = seal if body.wants_sealed else None
        self._summarises = body.summary is not None
        self._item = _OutputItem("message")  # the open one
        self._logprobs: list[Mapping[str, Any]] = []  # of tokens whose text has not come yet
        self._num_events = 0
        self._response = _running(body, chat)

    def begin(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        return [*self._told("response.created"), *self.ping()]

    def ping(self) -> list[JsonObject]:
        return self._told("response.in_progress")

    def take(self, choice: Mapping[str, Any]) -> list[JsonObject]:
        self._logprobs += (choice.get("logprobs") or {}).get("content") or []
        return self._numbered(super().take(choice))

    def finish(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        return self._numbered(super().finish(usage))

    def fail(self, status: int, message: str) -> list[JsonObject]:
        items = self.items if self.kind is None else [*self.items, self._item.json("incomplete")]
        error = {"code": "server_error", "message": message}
        response = self._response | {"status": "failed", "output": items, "error": error}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _open(self, kind: str, call: Call) -> list[JsonObject]:
        tool = self._tools.called(call[1]) if kind == "call" else None
        if tool is not None and tool.client is not None:
            self._item = _ClientCall(call[0], tool, tool.client)
        elif tool is not None:
            self._item = _OutputItem("custom_tool_call" if tool.is_custom else "function_call", call[0], tool)
        else:
            summarises = kind == "reasoning" and self._summarises
            self._item = _OutputItem("message" if kind == "content" else kind, summarises=summarises)
        return self._placed(self._item.opened())

    def _add(self, text: str) -> list[JsonObject]:
        return self._placed(self._item.add(text, self._new_logprobs()))

    def _done(self, *, is_last: bool) -> tuple[JsonObject, list[JsonObject]]:
        if is_last:
            self._item.add("", self._new_logprobs())
        is_cut = is_last and self.last.get("finish_reason") in ("length", "abort")
        item = self._item.json("incomplete" if is_cut else "completed", self._seal)
        return item, self._placed([*self._item.closed(), {"type": "response.output_item.done", "item": item}])

    def _end(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        status, reason = _STATUS.get(self.last.get("finish_reason") or "", ("completed", None))
        response = self._response | {"status": status, "output": self.items, "usage": _usage(usage)}
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            response["completed_at"] = int(time.time())
        return [{"type": _LAST_EVENT.get(status, "response.incomplete"), "response": response}]

    def _whole(self, events: list[JsonObject], usage: Mapping[str, Any]) -> JsonObject:
        response: JsonObject = events[-1]["response"]
        return response

    def _told(self, name: str) -> list[JsonObject]:
        return self._numbered([{"type": name, "response": self._response}])

    def _new_logprobs(self) -> list[Mapping[str, Any]]:
        """Those for the open item; only a message has any."""
        if self.kind != "content":
            return []
        found, self._logprobs = self._logprobs, []
        return found

    def _placed(self, events: Iterable[JsonObject]) -> list[JsonObject]:
        return [one | {"output_index": len(self.items)} for one in events]

    def _numbered(self, events: Iterable[JsonObject]) -> list[JsonObject]:
        numbered = [one | {"sequence_number": number} for number, one in enumerate(events, start=self._num_events)]
        self._num_events += len(numbered)
        return numbered


class _OutputItem:
    """One item, whose text or arguments grow; its events lack only their place in the response.

    The text of a custom tool comes whole at the end: before, it is a piece of JSON.  Reasoning that it ``summarises``
    has its text as a summary too, which is all that some clients show.
    """

    def __init__(
        self, kind: str, call_id: str = "", tool: CallableTool | None = None, *, summarises: bool = False
    ) -> None:
        prefix, self._event = _ITEMS[kind]
        self._kind, self._tool, self._call_id, self._summarises = kind, tool, call_id, summarises
        self._pieces: list[str] = []
        self._logprobs: list[Mapping[str, Any]] = []
        self._id = {"item_id": f"{prefix}_{uuid.uuid4().hex}"} | ({"content_index": 0} if tool is None else {})

    def opened(self) -> list[JsonObject]:
        """Begin the item, empty."""
        item = self.json("in_progress")
        if self._tool is not None:
            return [{"type": "response.output_item.added", "item": item}]
        part = {"type": "response.content_part.added", **self._id, "part": self._part()}
        empty = item | {"content": []} | ({"summary": []} if self._summarises else {})
        return [{"type": "response.output_item.added", "item": empty}, part, *self._summary_part("added")]

    def add(self, text: str, logprobs: list[Mapping[str, Any]]) -> list[JsonObject]:
        """Add to the text; a message keeps the log-probabilities."""
        self._pieces.append(text)
        self._logprobs += logprobs
        if not text or self._kind == "custom_tool_call":
            return []
        return [self._named("delta", {"delta": text}, logprobs), *self._summary_text("delta", {"delta": text})]

    def closed(self) -> list[JsonObject]:
        """End the text."""
        text = "".join(self._pieces)
        if self._tool is None:
            part = {"type": "response.content_part.done", **self._id, "part": self._part()}
            summary = [*self._summary_text("done", {"text": text}), *self._summary_part("done")]
            return [self._named("done", {"text": text}, self._logprobs), part, *summary]
        if not self._tool.is_custom:
            return [self._named("done", {"name": self._tool.name, "arguments": text})]
        text = custom_input(text)
        deltas = [self._named("delta", {"delta": text})] if text else []
        return [*deltas, self._named("done", {"input": text})]

    def json(self, status: str, seal: ReasoningSeal | None = None) -> JsonObject:
        """The item as it stands; ``seal`` also seals reasoning."""
        text = "".join(self._pieces)
        item: JsonObject = {"id": self._id["item_id"], "type": self._kind}
        if self._tool is not None:
            item |= {"call_id": self._call_id, "name": self._tool.name}
            if self._tool.namespace is not None:
                item["namespace"] = self._tool.namespace
            item |= {"input": custom_input(text)} if self._tool.is_custom else {"arguments": text}
        elif self._kind == "message":
            item |= {"role": "assistant", "content": [self._part()]}
        else:
            summary = [self._summary()] if self._summarises else []
            sealed = None if seal is None else seal.sealed(text)
            item |= {"summary": summary, "content": [self._part()], "encrypted_content": sealed}
        return item | {"status": status}

    def _part(self) -> JsonObject:
        part: JsonObject = {"type": self._event, "text": "".join(self._pieces)}
        return part | ({"annotations": [], "logprobs": list(self._logprobs)} if self._kind == "message" else {})

    def _summary(self) -> JsonObject:
        return {"type": "summary_text", "text": "".join(self._pieces)}

    def _summary_part(self, name: str) -> list[JsonObject]:
        return self._summary_event(f"part.{name}", {"part": self._summary()})

    def _summary_text(self, name: str, fields: JsonObject) -> list[JsonObject]:
        return self._summary_event(f"text.{name}", fields)

    def _summary_event(self, name: str, fields: JsonObject) -> list[JsonObject]:
        place = {"item_id": self._id["item_id"], "summary_index": 0}
        return [{"type": f"response.reasoning_summary_{name}", **place, **fields}] if self._summarises else []

    def _named(self, name: str, fields: JsonObject, logprobs: list[Mapping[str, Any]] | None = None) -> JsonObject:
        event = {"type": f"response.{self._event}.{name}", **self._id, **fields}
        return event | ({"logprobs": logprobs} if self._kind == "message" else {})


class _ClientCall(_OutputItem):
    """A call of a tool that OpenAI defines; it comes whole, because its item cannot be made from a part of it.

    Arguments that the tool does not have are those of a function, so that the client sees what the model wrote.
    """

    def __init__(self, call_id: str, tool: CallableTool, client: ClientTool) -> None:
        super().__init__("function_call", call_id, tool)
        self._client = client
        self._id = {"item_id": f"{client.prefix}_{uuid.uuid4().hex}"}
        self._call = {"id": self._id["item_id"], "type": client.item, "call_id": call_id}

    def opened(self) -> list[JsonObject]:
        return []

    def add(self, text: str, logprobs: list[Mapping[str, Any]]) -> list[JsonObject]:
        self._pieces.append(text)
        return []

    def closed(self) -> list[JsonObject]:
        text = "".join(self._pieces)
        if self._client.fields(text) is not None:
            return [{"type": "response.output_item.added", "item": self.json("in_progress")}]
        self._pieces = []
        return [*super().opened(), *super().add(text, []), *super().closed()]

    def json(self, status: str, seal: ReasoningSeal | None = None) -> JsonObject:
        fields = self._client.fields("".join(self._pieces))
        if fields is None:
            return super().json(status, seal)
        return {**self._call, **fields, "status": status if status == "in_progress" else "completed"}


def _running(body: ResponsesBody, chat: PreparedAnswer) -> JsonObject:
    """The response before its first item."""
    params = chat.requests[0].params
    text: JsonObject = {"format": (body.text and body.text.format) or {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    return {
        "id": f"resp_{chat.shape.response_id.removeprefix('chatcmpl-')}",
        "object": "response",
        "created_at": chat.shape.created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": chat.shape.model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": body.summary},
        "text": text,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "service_tier": "default",
        "store": False,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _usage(usage: Mapping[str, Any]) -> JsonObject:
    """The ``usage`` of a chat, under the names of the Responses API."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    completion_details = usage.get("completion_tokens_details") or {}
    images = {name: prompt_details[name] for name in ("image_tokens",) if name in prompt_details}
    cached = {"cached_tokens": prompt_details.get("cached_tokens", 0), "cache_write_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": cached | images,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion_details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
