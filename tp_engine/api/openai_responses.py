"""From generated sequences to OpenAI response bodies: whole answers, stream chunks and batch lines alike."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tp_engine.api.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs_json
from tp_engine.api.openai_protocol import ChatBody, CompletionBody
from tp_engine.outputs import CompletionOutput, RequestOutput

JsonObject: TypeAlias = dict[str, Any]

_OBJECTS = {
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts of one answer, over all its prompts and sequences."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> JsonObject:
        """OpenAI's ``usage``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What one answer looks like: fixed by the request, shared by all its choices and chunks.

    ``num_top_logprobs`` is None where no logprobs were asked for; ``num_per_prompt`` is the request's ``n``.
    """

    kind: Literal["completion", "chat"]
    response_id: str
    model: str
    created: int
    num_per_prompt: int
    num_top_logprobs: int | None
    return_token_ids: bool

    @classmethod
    def of(cls, body: CompletionBody | ChatBody, model: str) -> AnswerShape:
        """The shape that ``body`` asks for, with a fresh id and the current time."""
        is_chat = isinstance(body, ChatBody)
        num_top = (body.top_logprobs or 0 if body.logprobs else None) if isinstance(body, ChatBody) else body.logprobs
        return cls(
            kind="chat" if is_chat else "completion",
            response_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            num_per_prompt=body.n or 1,
            num_top_logprobs=num_top,
            return_token_ids=bool(body.return_token_ids),
        )

    def envelope(self, choices: list[JsonObject], usage: Usage | None, *, chunk: bool) -> JsonObject:
        """A body around ``choices``; a chunk without usage has no such field."""
        body: JsonObject = {
            "id": self.response_id,
            "object": _OBJECTS[self.kind, chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage.as_json()
        return body

    def answer(self, outputs: Sequence[RequestOutput], echoes: Sequence[str] | None = None) -> JsonObject:
        """The whole answer, one ``RequestOutput`` per prompt; ``echoes`` are texts to repeat before the answers."""
        choices = []
        usage = Usage()
        for number, output in enumerate(outputs):
            usage.prompt_tokens += len(output.prompt_token_ids)
            usage.cached_tokens += output.num_cached_tokens
            usage.completion_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            echo = echoes[number] if echoes else ""
            choices += [self._whole_choice(number, output, sequence, echo) for sequence in output.outputs]
        return self.envelope(choices, usage, chunk=False)

    def chunk_choice(self, number: int, part: CompletionOutput, text_offset: int = 0) -> JsonObject:
        """What one update adds to a sequence of prompt ``number``; ``part`` holds the new text and tokens only."""
        content = {"delta": {"content": part.text}} if self.kind == "chat" else {"text": part.text}
        return self._choice(number, part, content, text_offset)

    def first_choice(self, number: int, index: int, echo: str = "") -> JsonObject | None:
        """What precedes a sequence's first update: the role in a chat, the prompt in an echoed completion."""
        empty = CompletionOutput(index=index, text="", token_ids=[])
        if self.kind == "chat":
            return self._choice(number, empty, {"delta": {"role": "assistant", "content": ""}}, 0)
        return self._choice(number, empty, {"text": echo}, 0) if echo else None

    def _whole_choice(self, number: int, output: RequestOutput, sequence: CompletionOutput, echo: str) -> JsonObject:
        if self.kind == "chat":
            content: JsonObject = {"message": {"role": "assistant", "content": sequence.text}}
        else:
            content = {"text": echo + sequence.text}
        choice = self._choice(number, sequence, content, len(echo))
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _choice(self, number: int, part: CompletionOutput, content: JsonObject, text_offset: int) -> JsonObject:
        choice = {
            "index": number * self.num_per_prompt + part.index,
            **content,
            "logprobs": self._logprobs(part, text_offset),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _logprobs(self, part: CompletionOutput, text_offset: int) -> JsonObject | None:
        if self.num_top_logprobs is None or not part.logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(part.token_ids, part.logprobs, self.num_top_logprobs)
        return completion_logprobs(part.token_ids, part.logprobs, text_offset)
