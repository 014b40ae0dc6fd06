"""Asks a server with OpenAI's API: answers of chats and completions, and log-probabilities of continuations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.eval.tasks import EvalQuestion

_RETRIES_S = (0.5, 2.0, 8.0)
_BUSY = (429, 503)
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _AnswerMessage(msgspec.Struct, frozen=True):
    content: str | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None = None


class _AnswerChoice(msgspec.Struct, frozen=True):
    message: _AnswerMessage | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None


class _AnswerBody(msgspec.Struct, frozen=True):
    choices: list[_AnswerChoice]


class Continuation(NamedTuple):
    """A text's log-probability after a context, and whether each of its tokens is the likeliest one there."""

    logprob: float
    is_likeliest: bool


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Asks ``model`` behind ``client``.

    ``as_chat``: questions are messages of a user, and the server writes the model's template around them; else prompts
    as they are.  ``sampling`` are further fields of every body.
    """

    client: ServerClient
    model: str
    as_chat: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 32

    def ask_all(self, ask: Callable[[Item], Answer], items: Sequence[Item]) -> Iterable[Answer]:
        """Yield ``ask`` of each item in order, several at a time; the first error ends all."""
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="eval") as pool:
            try:
                yield from pool.map(ask, items)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def answer(self, question: EvalQuestion, examples: Sequence[EvalQuestion] = ()) -> str:
        """Return what the model answers; for a choice, the likeliest of the choices.  Raises ``ServerError``."""
        if question.scoring == "choice":
            context = _with_examples(question, examples)
            found = {choice: self.continuation(context, choice) for choice in question.choices}
            return max(found, key=lambda choice: found[choice].logprob)
        if self.as_chat:
            turns = [turn for one in examples for turn in (("user", one.chat_text()), ("assistant", one.example()))]
            turns.append(("user", question.chat_text()))
            messages = [{"role": role, "content": text} for role, text in turns]
            return self.chat(messages, question.max_tokens)
        stop = {"stop": list(question.stop)} if question.stop else {}
        return self.completion(_with_examples(question, examples), question.max_tokens, stop)

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, more: Mapping[str, Any] = _NOTHING) -> str:
        """Return the answer to a conversation."""
        return self._generated("/v1/chat/completions", {"messages": messages, **more}, max_tokens)

    def completion(self, prompt: str, max_tokens: int, more: Mapping[str, Any]) -> str:
        """Return what follows ``prompt``."""
        return self._generated("/v1/completions", {"prompt": prompt, **more}, max_tokens)

    def continuation(self, context: str, text: str) -> Continuation:
        """Return how likely ``text`` is after ``context``: the sum over its tokens, which the server shows with the
        prompt that it repeats.  A token that begins within the context and ends behind it counts as the text's."""
        asked = {"prompt": context + text, "echo": True, "logprobs": 1}
        shown = self._choice("/v1/completions", asked | {"max_tokens": 1}).logprobs
        if shown is None or len(shown.text_offset) != len(shown.token_logprobs):
            raise ServerError(f"{self.client.url} shows no log-probabilities of prompts (echo with logprobs)")
        ends = [*shown.text_offset[1:], len(context) + len(text) + 1]
        tops = shown.top_logprobs or [None] * len(ends)
        total, is_likeliest = 0.0, True
        for start, end, logprob, top in zip(shown.text_offset, ends, shown.token_logprobs, tops, strict=True):
            if end > len(context) and start < len(context) + len(text) and logprob is not None:
                total += logprob
                is_likeliest = is_likeliest and logprob >= max((top or {}).values(), default=logprob)
        return Continuation(total, is_likeliest)

    def _generated(self, path: str, asked: Mapping[str, Any], max_tokens: int) -> str:
        choice = self._choice(path, {"max_tokens": max_tokens, **asked})
        text = choice.text if choice.message is None else choice.message.content
        return text or ""

    def _choice(self, path: str, asked: Mapping[str, Any]) -> _AnswerChoice:
        body = {"model": self.model, "temperature": 0, **asked, **self.sampling}
        for wait_s in (*_RETRIES_S, None):
            try:
                found = msgspec.convert(self.client.post(path, body), _AnswerBody)
                return found.choices[0]
            except ServerError as error:
                if wait_s is None or error.status not in _BUSY:
                    raise
                time.sleep(wait_s)
            except (msgspec.ValidationError, IndexError) as error:
                raise ServerError(
                    f"{self.client.url}{path} answered with another shape than OpenAI's: {error}"
                ) from error
        raise AssertionError("the last attempt returns or raises")


def _with_examples(question: EvalQuestion, examples: Iterable[EvalQuestion]) -> str:
    shown = [f"{one.completion_text()} {one.example().strip()}\n\n" for one in examples]
    return "".join([*shown, question.completion_text()])
