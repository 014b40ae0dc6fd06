"""From updates of sequences to server-sent chunks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from tp_engine.api.openai_protocol import GenerationBody
from tp_engine.api.openai_requests import PreparedAnswer
from tp_engine.api.openai_responses import JsonObject, Usage
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.outputs import CompletionOutput
from tp_engine.server.replies import DONE_EVENT, event

Updates = AsyncGenerator[tuple[int, SequenceUpdate], None]


class ChunkWriter:
    """Turns the updates of one answer into its chunks; keeps what chunks need to know of earlier ones."""

    def __init__(self, body: GenerationBody, prepared: PreparedAnswer) -> None:
        self._body = body
        self._prepared = prepared
        self._shape = prepared.shape
        self._text_offsets: dict[tuple[int, int], int] = {}
        self._cached_tokens = [0] * len(prepared.requests)
        self._usage = Usage(prompt_tokens=sum(len(request.prompt_token_ids) for request in prepared.requests))

    async def events(self, updates: Updates) -> AsyncGenerator[bytes, None]:
        """All events of the stream; ``updates`` are pairs of prompt number and update, closed at the end."""
        async with contextlib.aclosing(updates):
            async for number, update in updates:
                for choice in self._choices(number, update):
                    usage = self._usage if self._body.continuous_usage else None
                    yield event(self._shape.envelope([choice], usage, chunk=True))
        if self._body.include_usage:
            yield event(self._shape.envelope([], self._usage, chunk=True))
        yield DONE_EVENT

    def _choices(self, number: int, update: SequenceUpdate) -> list[JsonObject]:
        """The chunks of one update: none while its text is held back, two for the first of a sequence."""
        self._count(number, update)
        place = (number, update.index)
        choices = [] if place in self._text_offsets else self._opening(number, update.index)
        part = CompletionOutput(
            index=update.index,
            text=update.text,
            token_ids=update.token_ids,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            logprobs=update.logprobs,
        )
        if part.text or part.finish_reason or part.logprobs or self._body.return_token_ids:
            choices.append(self._shape.chunk_choice(number, part, self._text_offsets[place]))
        self._text_offsets[place] += len(part.text)
        return choices

    def _opening(self, number: int, index: int) -> list[JsonObject]:
        echo = self._prepared.echoes[number] if self._prepared.echoes else ""
        self._text_offsets[number, index] = len(echo)
        first = self._shape.first_choice(number, index, echo)
        return [] if first is None else [first]

    def _count(self, number: int, update: SequenceUpdate) -> None:
        self._cached_tokens[number] = update.num_cached_tokens
        self._usage.cached_tokens = sum(self._cached_tokens)
        self._usage.completion_tokens += len(update.token_ids)
