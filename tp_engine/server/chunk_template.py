"""Chunks that differ in nothing but their text: encoded once around a mark, then joined from bytes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tp_engine.api.openai.answer_shape import AnswerShape
from tp_engine.api.openai.tools.events import CallArguments, ContentText, ReasoningText
from tp_engine.outputs import CompletionOutput
from tp_engine.server.replies import event

# Letters that JSON does not escape; no model's name or id holds them.
_MARK = "the-text-of-the-chunk-97d1f8a0c5"
_encode_text = msgspec.json.Encoder().encode


class ChunkTemplate:
    """The chunks of one sequence that hold text alone: no end, no log-probabilities, no ids, no usage.

    The text is content, or where chats are parsed what ``found`` is: content, reasoning, or arguments of one call.
    """

    __slots__ = ("_parts",)

    def __init__(
        self,
        shape: AnswerShape,
        number: int,
        index: int,
        found: ContentText | ReasoningText | CallArguments | None = None,
    ) -> None:
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
