"""From generated sequences to OpenAI bodies: whole answers, stream chunks and batch lines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from tp_engine.api.openai.chat.parser import ChatParsing, ParsedMessage
from tp_engine.api.openai.logprobs import Positions, chat_logprobs, completion_logprobs, prompt_logprobs_json
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.sampling import num_top_logprobs
from tp_engine.api.openai.tools.events import CallArguments, CallStarted, ChatEvent, ContentText, ReasoningText
from tp_engine.api.scored_tokens import ScoredTokens
from tp_engine.requests.outputs import CompletionOutput, RequestOutput

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
    reasoning_tokens: int | None = None  # None if texts are not searched for reasoning
    draft_tokens: int = 0
    accepted_tokens: int = 0
    image_tokens: int = 0

    def as_json(self) -> JsonObject:
        """OpenAI's ``usage``."""
        counts: JsonObject = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.image_tokens:
            counts["prompt_tokens_details"]["image_tokens"] = self.image_tokens
        details: JsonObject = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.draft_tokens:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_tokens
        if details:
            counts["completion_tokens_details"] = details
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The form of one answer, fixed by the request and shared by all choices and chunks.

    ``num_top_logprobs`` is None if the request asks for no logprobs; ``num_per_prompt`` is the request's ``n``.
    ``parsing``: what to find in a chat's texts; ``role`` is that of the answer.  ``echoes_logprobs``: the
    log-probabilities of a completion begin with those of the echoed prompt, whose first token is in ``first_texts``.
    ``only_echo``: the answer is the echo alone, without the one token that the engine must generate.
    ``tokens_as_ids``: log-probabilities name tokens ``token_id:17``, because texts of tokens are not unique.
    ``special_ids``: the tokenizer's special tokens, which texts lack if ``hides_specials``; for offsets of tokens.
    ``num_image_tokens`` of the prompt.
    """

    kind: Literal["completion", "chat"]
    response_id: str
    model: str
    created: int
    num_per_prompt: int
    num_top_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool = False
    echoes_logprobs: bool = False
    first_texts: tuple[str, ...] = ()
    only_echo: bool = False
    special_ids: frozenset[int] = frozenset()
    hides_specials: bool = True
    shows_prompt_logprobs: bool = True
    role: str = "assistant"
    parsing: ChatParsing | None = None
    num_image_tokens: int = 0

    @classmethod
    def of(cls, body: CompletionBody | ChatBody, model: str) -> AnswerShape:
        """The shape that ``body`` asks for, with its id or a fresh one, and the current time."""
        is_chat = isinstance(body, ChatBody)
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        num_top = num_top_logprobs(body)
        return cls(
            kind="chat" if is_chat else "completion",
            response_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{body.request_id or uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            num_per_prompt=body.n or 1,
            num_top_logprobs=num_top,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            echoes_logprobs=echo and num_top is not None,
            only_echo=echo and body.max_tokens == 0,
            hides_specials=body.skip_special_tokens is not False,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    def envelope(self, choices: list[JsonObject], usage: Usage | None, *, chunk: bool) -> JsonObject:
        """A body with these ``choices``; without ``usage`` it has no such field."""
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

    def new_usage(self) -> Usage:
        """Counts that are zero, except for the prompt's images."""
        has_reasoning = self.parsing is not None and self.parsing.reasoning is not None
        return Usage(reasoning_tokens=0 if has_reasoning else None, image_tokens=self.num_image_tokens)

    def answer(
        self, outputs: Sequence[RequestOutput], echoes: Sequence[str] | None = None, *, in_order: bool = False
    ) -> JsonObject:
        """The whole answer, one ``RequestOutput`` per prompt; ``echoes`` are texts to repeat before the answers.

        ``in_order``: a choice of a chat has ``deltas``, in the model's order, instead of a message.
        """
        choices = []
        usage = self.new_usage()
        for number, output in enumerate(outputs):
            usage.prompt_tokens += len(output.prompt_token_ids)
            usage.cached_tokens += output.num_cached_tokens
            sequences = (
                [emptied(sequence.index, "length") for sequence in output.outputs] if self.only_echo else output.outputs
            )
            usage.completion_tokens += sum(len(sequence.token_ids) for sequence in sequences)
            usage.draft_tokens += sum(sequence.num_draft_tokens for sequence in sequences)
            usage.accepted_tokens += sum(sequence.num_accepted_tokens for sequence in sequences)
            echo = echoes[number] if echoes else ""
            choices += [self._whole_choice(number, output, sequence, echo, usage, in_order) for sequence in sequences]
        body = self.envelope(choices, usage, chunk=False)
        if self.kind == "chat":  # in the body, as in vLLM; a chat has one prompt
            if self.return_token_ids:
                body["prompt_token_ids"] = outputs[0].prompt_token_ids
            body |= self._prompt_logprobs(outputs[0])
        if outputs and outputs[0].weight_version is not None:
            body["weight_version"] = outputs[0].weight_version
        return body

    def chunk_choice(self, number: int, part: CompletionOutput, text_offset: int = 0) -> JsonObject:
        """What one update adds to a sequence of prompt ``number``; ``part`` holds the new text and tokens
        only."""
        content = {"delta": {"content": part.text}} if self.kind == "chat" else {"text": part.text}
        return self._choice(number, part, content, text_offset)

    def event_choices(self, number: int, part: CompletionOutput, events: Sequence[ChatEvent]) -> list[JsonObject]:
        """A choice for each event of a parsed text; the last has the tokens of ``part``, and its end."""
        shows_tokens = self.return_token_ids or (self.num_top_logprobs is not None and part.logprobs)
        deltas = [delta_json(event) for event in events]
        if not deltas and (part.finish_reason or shows_tokens):
            deltas = [{}]
        parts = [emptied(part.index)] * (len(deltas) - 1) + [part]
        return [self._choice(number, one, {"delta": delta}, 0) for one, delta in zip(parts, deltas, strict=False)]

    def first_choice(
        self, number: int, index: int, echo: str = "", echoed_logprobs: JsonObject | None = None
    ) -> JsonObject | None:
        """The choice before a sequence's first update: the role in a chat, the prompt in an echoed
        completion."""
        empty = emptied(index)
        if self.kind == "chat":
            return self._choice(number, empty, {"delta": {"role": self.role, "content": echo}}, 0)
        if not echo and echoed_logprobs is None:
            return None
        return self._choice(number, empty, {"text": echo}, 0) | {"logprobs": echoed_logprobs}

    def echoed_logprobs(self, number: int, token_ids: Sequence[int], positions: Positions, echo: str) -> JsonObject:
        """The log-probabilities of a prompt repeated as ``echo``, which lacks the special tokens that the
        tokenizer added."""
        return completion_logprobs(
            token_ids,
            positions,
            is_hidden=lambda token_id, text, offset: token_id in self.special_ids and not echo.startswith(text, offset),
            as_ids=self.tokens_as_ids,
            first_text=self.first_texts[number],
        )

    def num_characters(self, part: CompletionOutput) -> int:
        """By how much the tokens of ``part``, whose choice has been made, move the offset of the next one."""
        if self.kind == "chat" or not isinstance(part.logprobs, ScoredTokens):
            return 0
        return sum(
            len(text)
            for token_id, text in zip(part.token_ids, part.logprobs.texts(), strict=False)
            if not (self.hides_specials and token_id in self.special_ids)
        )

    def _whole_choice(
        self,
        number: int,
        output: RequestOutput,
        sequence: CompletionOutput,
        echo: str,
        usage: Usage,
        in_order: bool,
    ) -> JsonObject:
        if self.kind == "chat" and self.parsing is not None:
            parsed = self.parsing.parse(sequence.text, sequence.token_ids, sequence.finish_reason)
            content: JsonObject = {"message": message_json(self.parsing, parsed, self.role, echo)}
            if in_order:
                content = {"deltas": [{"content": echo}, *map(delta_json, parsed.events)]}
            sequence = replace(sequence, finish_reason=parsed.finish_reason)
            if usage.reasoning_tokens is not None:
                usage.reasoning_tokens += parsed.num_reasoning_tokens
        elif self.kind == "chat":
            content = {"message": {"role": self.role, "content": echo + sequence.text}}
            if in_order:
                content = {"deltas": [content["message"]]}
        else:
            content = {"text": echo + sequence.text}
        choice = self._choice(number, sequence, content, len(echo))
        if self.echoes_logprobs and output.prompt_logprobs is not None:
            columns = self.echoed_logprobs(number, output.prompt_token_ids, output.prompt_logprobs, echo)
            own = choice["logprobs"] or {}
            choice["logprobs"] = {name: column + own.get(name, []) for name, column in columns.items()}
        if self.kind != "chat":
            choice |= self._prompt_logprobs(output)
        if self.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_logprobs(self, output: RequestOutput) -> JsonObject:
        if output.prompt_logprobs is None or not self.shows_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs_json(output.prompt_token_ids, output.prompt_logprobs)}

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
            return chat_logprobs(part.token_ids, part.logprobs, self.num_top_logprobs, as_ids=self.tokens_as_ids)
        return completion_logprobs(
            part.token_ids,
            part.logprobs,
            text_offset,
            is_hidden=lambda token_id, text, offset: self.hides_specials and token_id in self.special_ids,
            as_ids=self.tokens_as_ids,
        )


def emptied(index: int, finish_reason: str | None = None) -> CompletionOutput:
    """A sequence without tokens."""
    return CompletionOutput(index=index, text="", token_ids=[], finish_reason=finish_reason)


def message_json(parsing: ChatParsing, parsed: ParsedMessage, role: str, echo: str = "") -> dict[str, Any]:
    """The message of a whole answer; ``echo`` is a text to repeat before its content.

    Content is null if there are only calls.  Reasoning also has its newer name; it is null if there is none.
    """
    content = echo + parsed.content
    is_null = not content and bool(parsed.calls or parsed.reasoning)
    message: dict[str, Any] = {"role": role, "content": None if is_null else content}
    if parsing.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = parsed.reasoning or None
    if parsed.calls:
        message["tool_calls"] = [_call_json(*call) for call in parsed.calls]
    return message


def delta_json(event: ChatEvent) -> dict[str, Any]:
    """What one event adds to a message that is streamed."""
    match event:
        case ReasoningText(text):
            return {"reasoning_content": text, "reasoning": text}
        case ContentText(text):
            return {"content": text}
        case CallStarted(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call_json(call_id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call_json(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
