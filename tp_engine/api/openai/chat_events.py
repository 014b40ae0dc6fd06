"""The common part of other APIs' streams: the choices of a chat, whole or in chunks, become items and events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[str, str]
"""The id of a tool call, and the name of its function."""


class ChatEventWriter(ABC):
    """Turns the choices of one chat into the events of another API; ``items`` are those that are done.

    One item is open at a time, of the ``kind`` reasoning, content or call, in the order in which the chat brings them.
    ``last`` is the choice with the finish reason.
    """

    call_prefix: str

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        self.kind: str | None = None
        self.last: Mapping[str, Any] = {}
        self._call_index: int | None = None  # which of the chat's tool calls is open

    @abstractmethod
    def begin(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """The events before the first choice; ``usage`` counts the prompt."""

    def take(self, choice: Mapping[str, Any]) -> list[JsonObject]:
        """The events of a choice of a chunk; its ``delta`` may have reasoning, content and tool calls."""
        delta = choice["delta"]
        events: list[JsonObject] = []
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._grow("reasoning", thought)
        if content := delta.get("content"):
            events += self._grow("content", content)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function, index = call.get("function") or {}, call.get("index", number)
            if self.kind != "call" or index != self._call_index:
                call_id = call.get("id") or f"{self.call_prefix}_{uuid.uuid4().hex}"
                events += self._switch("call", (call_id, function.get("name") or ""))
                self._call_index = index
            if arguments := function.get("arguments"):
                events += self._add(arguments)
        if choice.get("finish_reason"):
            self.last = choice
        return events

    def finish(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """The last events, with the chat's ``usage``; an empty answer gets an empty text."""
        events = [] if self.items or self.kind is not None else self._switch("content")
        return events + self._close(is_last=True) + self._end(usage)

    @abstractmethod
    def ping(self) -> list[JsonObject]:
        """Events that only say that the answer is still being made, after ``begin``."""

    @abstractmethod
    def fail(self, status: int, message: str) -> list[JsonObject]:
        """The last events after an error that came after ``begin``; ``status`` is what HTTP would have said."""

    def whole(self, chat: Mapping[str, Any]) -> JsonObject:
        """The whole answer, from that of the chat, whose choice has a message, or ``deltas`` in order; for a new
        writer."""
        choice = chat["choices"][0]
        first, *others = choice.get("deltas") or [choice["message"]]
        self.take(choice | {"delta": first})
        for delta in others:
            self.take({"delta": delta})
        return self._whole(self.finish(chat["usage"]), chat["usage"])

    @abstractmethod
    def _open(self, kind: str, call: Call) -> list[JsonObject]:
        """Begin an item."""

    @abstractmethod
    def _add(self, text: str) -> list[JsonObject]:
        """Add to the open item."""

    @abstractmethod
    def _done(self, *, is_last: bool) -> tuple[JsonObject, list[JsonObject]]:
        """The open item, which is complete, and the events of its end."""

    @abstractmethod
    def _end(self, usage: Mapping[str, Any]) -> list[JsonObject]:
        """The events after all items."""

    @abstractmethod
    def _whole(self, events: list[JsonObject], usage: Mapping[str, Any]) -> JsonObject:
        """The whole answer, after the last ``events``."""

    def _grow(self, kind: str, text: str) -> list[JsonObject]:
        events = [] if self.kind == kind else self._switch(kind)
        return events + self._add(text)

    def _switch(self, kind: str, call: Call = ("", "")) -> list[JsonObject]:
        events = self._close()
        self.kind = kind
        return events + self._open(kind, call)

    def _close(self, *, is_last: bool = False) -> list[JsonObject]:
        if self.kind is None:
            return []
        item, events = self._done(is_last=is_last)
        self.items.append(item)
        self.kind = None
        return events
