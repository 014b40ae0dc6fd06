"""What a server with OpenAI's API shows of its model: tokens, log-probabilities and ends, in its own dialect.

::

    asked for                     tp_engine, vLLM                  llama.cpp                    others
    tokens of a text              /tokenize prompt                 /tokenize content            usage.prompt_tokens
    tokens of a chat              /tokenize messages               /apply-template, /tokenize   usage.prompt_tokens
    log-probabilities of prompts  prompt_logprobs                  -                            echo with logprobs
    ids of generated tokens       token_ids, token_id:17           id                           by the tokenizer

A server that does not know a field ignores it, or refuses the request; then it is asked again without.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tp_engine.api.server_client import ServerClient, ServerError
from tp_engine.apps.check.answers import ALTERNATIVES, Answer, answer_of
from tp_engine.apps.check.behaviour import PUSH, NotShownError
from tp_engine.apps.check.prompts import (
    NO_TOOLS,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    CheckPrompt,
    tool_chat_ids,
)
from tp_engine.apps.check.report import CheckFinding

_AS_ID = "token_id:"
_SHAPED_TOKENS = 128
_LOWEST = -1e4  # llama.cpp writes the lowest float for a probability of zero
# Fields that not every server knows.
_EXTRAS: Mapping[str, Any] = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
_REFUSED = (400, 404, 405, 422, 501)

Row = dict[int, float]
"""Token id -> log-probability after one position."""


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Turn what cannot be read in an answer into a ``ServerError``; decorates a method."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, OverflowError, ValueError) as error:
        raise ServerError(f"the server answered with values of another kind than OpenAI's API: {error}") from error


class ServedModel:
    """The model ``name`` behind ``client``; ``tokenizer``, transformers', names tokens that a server tells as texts."""

    def __init__(self, client: ServerClient, name: str, tokenizer: Any | None) -> None:
        self.name = name
        self._client = client
        self._tokenizer = tokenizer
        self._by_text: dict[str, int] | None = None
        self._extras = dict(_EXTRAS)
        self.shows_prompts = True

    @_understood()
    def token_ids(self, text: str) -> list[int]:
        """A text's tokens, special ones included, by ``/tokenize``; ``NotShownError`` without it."""
        for body in ({"prompt": text, "add_special_tokens": True}, {"content": text, "add_special": True}):
            found = self._optional("/tokenize", {"model": self.name, **body})
            if found is not None and isinstance(found.get("tokens"), list) and found["tokens"]:
                return [int(one) for one in found["tokens"]]
        raise NotShownError("the server has no /tokenize")

    @_understood()
    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """A chat's tokens by the server's template; ``NotShownError`` if the server does not tell them."""
        body = {"messages": list(messages), "add_generation_prompt": True, **options}
        found = self._optional("/tokenize", {"model": self.name, **body})
        if found is not None and isinstance(found.get("tokens"), list) and found["tokens"]:
            return [int(one) for one in found["tokens"]]
        written = self._optional("/apply-template", {"messages": list(messages), **options})
        if written is None or not isinstance(written.get("prompt"), str):
            raise NotShownError("the server has neither /tokenize for messages nor /apply-template")
        text = written["prompt"]
        asked = {"content": text, "add_special": False, "parse_special": True}
        tokens = self._client.post("/tokenize", asked).get("tokens", [])
        return [int(one) for one in tokens]

    @_understood()
    def num_prompt_tokens(self, content: str | Sequence[Mapping[str, Any]]) -> int | None:
        """How many tokens a text or a chat has, as the answer's usage tells; None if it does not."""
        path, body = ("/v1/completions", {"prompt": content})
        if not isinstance(content, str):
            path, body = ("/v1/chat/completions", {"messages": list(content)})
        usage = self._client.post(path, {"model": self.name, "max_tokens": 1, **body}).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) else None

    @_understood()
    def end_after(self, token: int) -> str | None:
        """The reason of the end of an answer that the server was made to choose ``token`` for."""
        asked = {"prompt": "The harbour", "max_tokens": 8, "logit_bias": {str(token): PUSH}}
        return self._ask("/v1/completions", asked).get("finish_reason")

    @_understood()
    def shaped_answer(self) -> str | None:
        """A chat's answer with ``response_format``; ``NotShownError`` if it is longer than usual."""
        shape = {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True}
        asked = {
            "messages": [{"role": "user", "content": "The weather in Oslo, as JSON."}],
            "response_format": {"type": "json_schema", "json_schema": shape},
        }
        text = self._shaped(asked).get("content")
        return text if isinstance(text, str) else None

    def check_call(self, name: str, tokenizer: Any | None) -> Iterator[CheckFinding]:
        """Yield whether a forced call of a tool comes as one."""
        tool = WEATHER_TOOL["function"]["name"]
        choice = {"type": "function", "function": {"name": tool}}
        message = self._shaped({"messages": WEATHER_QUESTION, "tools": [WEATHER_TOOL], "tool_choice": choice})
        try:
            function = message["tool_calls"][0]["function"]
            if function["name"] == tool and json.loads(function["arguments"])["city"] in ("Oslo", "Lima"):
                yield CheckFinding.right(name, f"a forced call comes as {tool}({function['arguments']})")
                return
        except (ValueError, TypeError, LookupError):
            pass
        came = f"a forced call of {tool} came as {str(message)[:200]}"
        if not getattr(tokenizer, "chat_template", None) or tool_chat_ids(tokenizer, WEATHER_QUESTION) is None:
            yield CheckFinding.skipped(name, f"{NO_TOOLS}; {came}")
            return
        yield CheckFinding.wrong(
            name,
            came,
            "tool_choice",
            "agents get text, or arguments that do not follow the tool's schema",
            "--tool-call-parser with the format of the model, and --enable-auto-tool-choice where the server has it",
        )

    @_understood()
    def answer(self, prompt: CheckPrompt, max_tokens: int, *, of_prompt: bool = False) -> Answer:
        """Continue a prompt, sent as token ids, greedily; ``of_prompt``: with the log-probabilities of the prompt too,
        if the server shows them.

        ``NotShownError`` if it shows no log-probabilities.
        """
        body = {"prompt": list(prompt.token_ids), "max_tokens": max_tokens, "logprobs": ALTERNATIVES}
        if of_prompt and self.shows_prompts:
            answer = self._complete("/v1/completions", {**body, "prompt_logprobs": ALTERNATIVES})
        else:
            answer = self._complete("/v1/completions", body)
        choice = _choice(answer)
        rows = self._prompt_rows(prompt, choice.get("prompt_logprobs")) if of_prompt else None
        if of_prompt and rows is None and self.shows_prompts:
            rows = self._echoed(prompt)
            self.shows_prompts = rows is not None
        return self._as_answer(prompt, choice, rows, answer)

    @_understood()
    def chat(self, prompt: CheckPrompt, max_tokens: int) -> Answer:
        """Answer a chat greedily, through the server's template; ``NotShownError`` without log-probabilities."""
        body = {
            "messages": list(prompt.messages or ()),
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        answer = self._complete("/v1/chat/completions", body)
        return self._as_answer(prompt, _choice(answer), None, answer)

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of a greedy answer."""
        return _choice(self._client.post(path, {"model": self.name, "temperature": 0, **body}))

    @_understood()
    def _shaped(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The message of a chat whose form is given."""
        choice = self._ask("/v1/chat/completions", {"max_tokens": _SHAPED_TOKENS, **body})
        if choice.get("finish_reason") == "length":
            raise NotShownError(f"the answer is longer than {_SHAPED_TOKENS} tokens")
        return dict(choice.get("message") or {})

    def _complete(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = {"model": self.name, "temperature": 0, **body}
        try:
            return self._client.post(path, {**asked, **self._extras})
        except ServerError as error:
            if error.status not in _REFUSED or not self._extras:
                raise
        answer = self._client.post(path, {name: one for name, one in asked.items() if name != "prompt_logprobs"})
        self._extras = {}
        return answer

    def _optional(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            return self._client.post(path, body)
        except ServerError as error:
            if error.status in _REFUSED:
                return None
            raise

    def _echoed(self, prompt: CheckPrompt) -> list[Row] | None:
        """The log-probabilities of a prompt's own tokens, by ``echo``."""
        body = {"prompt": list(prompt.token_ids), "max_tokens": 1, "echo": True, "logprobs": 1}
        found = self._optional("/v1/completions", {"model": self.name, "temperature": 0, **body})
        values = ((_choice(found).get("logprobs") or {}).get("token_logprobs") or []) if found is not None else []
        if len(values) < len(prompt.token_ids) or not all(isinstance(one, float) for one in values[1:]):
            return None
        pairs = zip(prompt.token_ids[1:], values[1:], strict=False)
        return [{token: value} for token, value in pairs]

    @staticmethod
    def _prompt_rows(prompt: CheckPrompt, given: Any) -> list[Row] | None:
        if not isinstance(given, list) or len(given) != len(prompt.token_ids):
            return None
        return [{int(token): float(one["logprob"]) for token, one in row.items()} for row in given[1:]]

    def _as_answer(
        self, prompt: CheckPrompt, choice: Mapping[str, Any], of_prompt: list[Row] | None, answer: Mapping[str, Any]
    ) -> Answer:
        entries = list(self._entries(choice)) if _is_complete(choice, answer) else []
        told = choice.get("token_ids")
        tokens = [token for token, _ in entries]
        if isinstance(told, list) and len(told) >= len(entries):
            tokens = [int(one) for one in told[: len(entries)]]
        if not tokens and of_prompt is None:
            raise NotShownError("the server does not show the log-probability of each token, or not which token it is")
        rows = [*(of_prompt or [{}] * (len(prompt.token_ids) - 1)), *(row for _, row in entries)]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return answer_of(prompt, tokens, rows, int(details.get("cached_tokens") or 0))

    def _entries(self, choice: Mapping[str, Any]) -> Iterator[tuple[int, Row]]:
        """Each generated token, with the log-probabilities of it and of its alternatives, up to the first token whose
        text several tokens have."""
        found = choice.get("logprobs") or {}
        if isinstance(found.get("content"), list):  # of chats, and of llama.cpp
            given = [(one, one["logprob"], one.get("top_logprobs") or ()) for one in found["content"]]
        else:
            columns = (found.get(name) or () for name in ("tokens", "token_logprobs", "top_logprobs"))
            given = [
                ({"token": text}, value, [{"token": other, "logprob": one} for other, one in (top or {}).items()])
                for text, value, top in zip(*columns, strict=False)
            ]
        for told, value, top in given:
            token = self._id_of(told)
            if token is None:
                return
            row = {other: _number(one["logprob"]) for one in top if (other := self._id_of(one)) is not None}
            yield token, {**row, token: _number(value)}

    def _id_of(self, told: Mapping[str, Any]) -> int | None:
        if isinstance(told.get("id"), int):
            return int(told["id"])
        text = str(told["token"])
        if text.startswith(_AS_ID) and text[len(_AS_ID) :].isdecimal():
            return int(text[len(_AS_ID) :])
        if self._by_text is None:
            self._by_text = self._texts()
        return self._by_text.get(text)

    def _texts(self) -> dict[str, int]:
        """Token ids by their texts, where only one token has the text."""
        if self._tokenizer is None:
            return {}
        texts = self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])
        counts = Counter(texts)
        return {text: token for token, text in enumerate(texts) if counts[text] == 1}


def _is_complete(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether each generated token has an entry: llama.cpp leaves out those that end within a character.  The token
    that ends an answer may have none."""
    found = choice.get("logprobs") or {}
    shown = len(found.get("content") or found.get("tokens") or ())
    count = (answer.get("usage") or {}).get("completion_tokens")
    return (
        not isinstance(count, int) or shown == count or (choice.get("finish_reason") == "stop" and shown == count - 1)
    )


def _number(value: Any) -> float:
    return max(float(value), _LOWEST) if isinstance(value, (int, float)) and math.isfinite(value) else _LOWEST


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"an answer without choices: {str(answer)[:200]}")
    return dict(choices[0])
