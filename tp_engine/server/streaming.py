"""From the updates of sequences to server-sent events: chunks of chats and completions, typed events of other APIs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import msgspec

from tp_engine.api.openai.answer_shape import AnswerShape, JsonObject, emptied
from tp_engine.api.openai.chat.parser import ChatParser
from tp_engine.api.openai.errors import describe_error
from tp_engine.api.openai.requests import PreparedAnswer, PreparedFromChat
from tp_engine.api.openai.tools.events import CallArguments, CallStarted, ChatEvent, ContentText, ReasoningText
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.requests.outputs import CompletionOutput
from tp_engine.server.replies import DONE_EVENT, PING, event

Item = TypeVar("Item")
TextEvent: TypeAlias = ContentText | ReasoningText | CallArguments
Batches = AsyncGenerator[tuple[int, list[SequenceUpdate]], None]

_MAX_WAITING = 64
# JSON escapes none of these characters; no model's name or id contains them.
_MARK = "the-text-of-the-chunk-97d1f8a0c5"
_encode_text = msgspec.json.Encoder().encode


class ChunkWriter:
    """Turns the updates of one answer into its chunks, and keeps what later chunks need of earlier ones.

    ``usage`` counts what has been written so far.
    """

    def __init__(self, prepared: PreparedAnswer) -> None:
        self._body = body = prepared.body
        self._prepared = prepared
        self._shape = prepared.shape
        self._text_offsets: dict[tuple[int, int], int] = {}  # of the next token; of sequences that have begun
        self._held: dict[int, list[SequenceUpdate]] = {}
        self._echoed_logprobs: dict[int, JsonObject | None] = {}
        self._cached_tokens = [0] * len(prepared.requests)
        self._parsers: dict[tuple[int, int], ChatParser] = {}
        self.usage = self._shape.new_usage()
        self.usage.prompt_tokens = sum(len(request.prompt_token_ids) for request in prepared.requests)
        # Whether chunks hold text alone.  Every option that adds to chunks must be named here.
        self._is_plain = not (
            body.continuous_usage or body.return_token_ids or self._shape.num_top_logprobs is not None
        )
        self._templates: dict[tuple[object, ...], ChunkTemplate] = {}

    async def events(self, batches: Batches) -> AsyncGenerator[bytes, None]:
        """Yield all events of the stream, those of one batch together; closes ``batches`` of (prompt number,
        updates)."""
        async with contextlib.aclosing(batches):
            async for number, updates in batches:
                if self._shape.echoes_logprobs and number not in self._echoed_logprobs:
                    data = await asyncio.to_thread(self._joined, number, updates)  # those of a whole prompt
                else:
                    data = self._joined(number, updates)
                if data:
                    yield data
        if self._body.include_usage:
            yield event(self._shape.envelope([], self.usage, chunk=True))
        yield DONE_EVENT

    def _joined(self, number: int, updates: list[SequenceUpdate]) -> bytes:
        return b"".join([self._events(number, update) for update in self._released(number, updates)])

    def failure(self, error: Exception) -> bytes:
        """The last events after an error."""
        return event(describe_error(error)[1]) + DONE_EVENT

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def _events(self, number: int, update: SequenceUpdate) -> bytes:
        """The events of one update; nothing while its text is held back."""
        if self._is_plain and update.finish_reason is None and (number, update.index) in self._text_offsets:
            self._count(number, update, len(update.token_ids))
            return self._plain_events(number, update)
        usage = self.usage if self._body.continuous_usage else None
        choices = self.choices(number, update)  # one after the other: they count in between
        return b"".join(event(self._shape.envelope([choice], usage, chunk=True)) for choice in choices)

    def _released(self, number: int, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """``updates``, or nothing until sequence 0 has brought the log-probabilities of an echoed prompt."""
        if not self._shape.echoes_logprobs or number in self._echoed_logprobs:
            return updates
        held = self._held.setdefault(number, [])
        held += updates
        first = next((update for update in updates if update.index == 0), None)
        if first is None:
            return []
        self._echoed_logprobs[number] = None  # if the request was aborted before they came
        if first.prompt_logprobs is not None:
            token_ids, echo = self._prepared.requests[number].prompt_token_ids, self._echo(number)
            self._echoed_logprobs[number] = self._shape.echoed_logprobs(number, token_ids, first.prompt_logprobs, echo)
        return self._held.pop(number)

    def _plain_events(self, number: int, update: SequenceUpdate) -> bytes:
        """The encoded chunks of an update that is neither the first nor the last of its sequence."""
        place = (number, update.index)
        parser = self._parsers.get(place)
        if parser is not None:
            found = self._parse(parser, update)
            return b"".join([self._found_event(number, update.index, one) for one in found])
        return self._template(number, update.index, None).event(update.text) if update.text else b""

    def choices(self, number: int, update: SequenceUpdate) -> Iterator[JsonObject]:
        """Yield the chunks of one update: none while its text is held back, two for the first of a sequence."""
        place = (number, update.index)
        ids = {"prompt_token_ids": self._prepared.requests[number].prompt_token_ids}
        first = ids if place not in self._text_offsets and self._body.return_token_ids else {}
        if place not in self._text_offsets and (opening := self._opening(number, update.index)) is not None:
            yield opening | first
            first = {}
        part = emptied(update.index, "length") if self._shape.only_echo else update
        self._count(number, update, len(part.token_ids))
        for choice in self._following(number, part):
            yield choice | first
            first = {}

    def _following(self, number: int, part: CompletionOutput) -> list[JsonObject]:
        """The choices of ``part`` after the opening one."""
        place = (number, part.index)
        if self._shape.parsing is not None:
            parser = self._parsers.get(place)
            if parser is None:
                parser = self._parsers[place] = self._shape.parsing.new_parser()
            return self._shape.event_choices(number, part, self._parse(parser, part))
        if part.text or part.finish_reason or part.logprobs or self._body.return_token_ids:
            choice = self._shape.chunk_choice(number, part, self._text_offsets[place])
            self._text_offsets[place] += self._shape.num_characters(part)
            return [choice]
        return []

    def _parse(self, parser: ChatParser, part: CompletionOutput) -> list[ChatEvent]:
        """What the parser is sure of now: reasoning, content, calls; at the end it sets the finish reason."""
        num_before = parser.num_reasoning_tokens
        events = parser.feed(part.text, part.token_ids)
        if part.finish_reason is not None:
            events += parser.finish(part.finish_reason)
            part.finish_reason = parser.finish_reason(part.finish_reason)
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += parser.num_reasoning_tokens - num_before
        return events

    def _found_event(self, number: int, index: int, found: ChatEvent) -> bytes:
        """The event of something found in a text, made from a template unless a call begins."""
        if isinstance(found, CallStarted):
            choices = self._shape.event_choices(number, emptied(index), [found])
            return event(self._shape.envelope(choices, None, chunk=True))
        return self._template(number, index, found).event(found.text)

    def _template(self, number: int, index: int, found: TextEvent | None) -> ChunkTemplate:
        key = (number, index, type(found), found.index if isinstance(found, CallArguments) else 0)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = ChunkTemplate(self._shape, number, index, found)
        return template

    def _opening(self, number: int, index: int) -> JsonObject | None:
        echo = self._echo(number)
        self._text_offsets[number, index] = len(echo)
        return self._shape.first_choice(number, index, echo, self._echoed_logprobs.get(number))

    def _echo(self, number: int) -> str:
        return self._prepared.echoes[number] if self._prepared.echoes else ""

    def _count(self, number: int, update: SequenceUpdate, num_tokens: int) -> None:
        if update.num_cached_tokens != self._cached_tokens[number]:
            self._cached_tokens[number] = update.num_cached_tokens
            self.usage.cached_tokens = sum(self._cached_tokens)
        self.usage.completion_tokens += num_tokens
        if update.finish_reason is not None:
            self.usage.draft_tokens += update.num_draft_tokens
            self.usage.accepted_tokens += update.num_accepted_tokens


class ChunkTemplate:
    """Makes the chunks of one sequence that hold text alone: encoded once around a mark, then joined from bytes.

    Such chunks have no end, log-probabilities, ids or usage.  The text is content; in parsed chats it is what ``found``
    is: content, reasoning, or the arguments of one call.
    """

    __slots__ = ("_parts",)

    def __init__(self, shape: AnswerShape, number: int, index: int, found: TextEvent | None = None) -> None:
        part = CompletionOutput(index=index, text=_MARK, token_ids=[])
        if found is None:
            choice = shape.chunk_choice(number, part)
        else:
            (choice,) = shape.event_choices(number, part, [replace(found, text=_MARK)])
        whole = event(shape.envelope([choice], None, chunk=True))
        self._parts = whole.split(_encode_text(_MARK))

    def event(self, text: str) -> bytes:
        """The server-sent event of a chunk with ``text``."""
        return _encode_text(text).join(self._parts)


class ChatEventStream:
    """Turns the updates of a chat into the events of the API that asked for it."""

    def __init__(self, prepared: PreparedFromChat) -> None:
        self._chunks = ChunkWriter(prepared.chat)
        self._writer = prepared.new_writer()
        self._begun = False

    async def events(self, batches: Batches) -> AsyncGenerator[bytes, None]:
        """Yield all events of the stream, those of one batch together; closes ``batches``."""
        async with contextlib.aclosing(batches):
            async for number, updates in batches:
                # they count before the beginning, which tells how much of the prompt was cached
                choices = [choice for update in updates for choice in self._chunks.choices(number, update)]
                events = self._beginning()
                for choice in choices:
                    events += self._writer.take(choice)
                if events:
                    yield _data(events)
        yield _data([*self._beginning(), *self._writer.finish(self._chunks.usage.as_json())])

    def failure(self, error: Exception) -> bytes:
        """The last events after an error: those up to ``response.failed``."""
        status, body = describe_error(error)
        return _data([*self._beginning(), *self._writer.fail(status, body["error"]["message"])])

    def ping(self) -> bytes:
        """Events without news: some clients (Codex) give up a stream on which only comments come."""
        return _data(self._beginning() or self._writer.ping())

    def _beginning(self) -> list[JsonObject]:
        events = [] if self._begun else self._writer.begin(self._chunks.usage.as_json())
        self._begun = True
        return events


def _data(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join([b"event: %s\ndata: %s\n\n" % (one["type"].encode(), msgspec.json.encode(one)) for one in events])


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Several streams as one: (number of the stream, its next item) as they come.  Closing it closes all streams.

    The first failure ends it.  A slow consumer holds up the streams once ``_MAX_WAITING`` items wait for it.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | None] = asyncio.Queue(_MAX_WAITING)

    async def feed(number: int, stream: AsyncGenerator[Item, None]) -> None:
        async with contextlib.aclosing(stream) as items:
            async for item in items:
                await queue.put((number, item))

    async def end_when_done() -> None:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await queue.put(None)

    tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    watcher = asyncio.create_task(end_when_done())
    try:
        while (pair := await queue.get()) is not None:
            yield pair
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, watcher):
            task.cancel()
        await asyncio.gather(*tasks, watcher, return_exceptions=True)
