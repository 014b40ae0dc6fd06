"""A model's files besides weights: tokens, chat template, ends of sequences, answers by schema.

Each check asks a ``Subject``, an engine here or a server, and compares with transformers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tp_engine.api.server_client import ServerError
from tp_engine.apps.check.prompts import (
    CHATS,
    PROMPT_REMEDY,
    TEXTS,
    UNSETTLED,
    chat_ids,
    differing_prompt,
    follows_weather_schema,
    text_ids,
)
from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.errors import RequestError

PUSH = 100.0  # a bias that outweighs all other tokens


class NotShownError(RuntimeError):
    """A subject has no way to show something."""


class Subject(Protocol):
    """What is checked.  A method raises ``NotShownError`` for what it cannot show, and ``RequestError`` or
    ``ServerError`` for what is refused."""

    def token_ids(self, text: str) -> list[int]:
        """A text's tokens, special ones included."""

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A chat's tokens by the template."""

    def num_prompt_tokens(self, content: str | Sequence[Mapping[str, Any]]) -> int | None:
        """The number of tokens of a text or a chat, None if it is not told."""

    def end_after(self, token: int) -> str | None:
        """Return why an answer ended whose likeliest token was ``token`` all the time."""

    def shaped_answer(self) -> str | None:
        """An answer that must follow ``WEATHER_SCHEMA``."""


def check_behaviour(
    subject: Subject, tokenizer: Any | None, folder: Path, template: Mapping[str, Any] | None
) -> Iterator[CheckFinding]:
    """Yield the findings.  ``tokenizer`` is transformers', ``folder`` that of the oracle; ``template`` are options of
    ``apply_chat_template``, None if there is no template."""
    yield from timed("tokens", _check_tokens, subject, tokenizer)
    yield from timed("chat template", _check_template, subject, tokenizer, template)
    yield from timed("end of sequence", _check_ends, subject, folder)
    if tokenizer is not None:
        yield from timed("JSON by schema", _check_json, subject)


def timed(name: str, check: Callable[..., Iterator[CheckFinding]], *arguments: Any) -> Iterator[CheckFinding]:
    """Yield the findings of one check; one that the engine or the server refuses is skipped, and the others go on."""
    begun_s = time.monotonic()
    try:
        for one in check(name, *arguments):
            yield replace(one, seconds=time.monotonic() - begun_s)
    except NotShownError as error:
        yield CheckFinding.skipped(name, str(error))
    except RequestError as error:
        yield CheckFinding.skipped(name, f"the engine refuses the request: {error}")
    except ServerError as error:
        if error.status is None:
            raise
        yield CheckFinding.skipped(name, f"the server refuses the request (status {error.status}): {error}")


def _check_tokens(name: str, subject: Subject, tokenizer: Any | None) -> Iterator[CheckFinding]:
    if tokenizer is None:
        yield CheckFinding.skipped(name, "the model has no tokenizer")
        return
    told = "texts have the tokens of transformers' tokenizer"
    yield _compared(name, TEXTS, partial(text_ids, tokenizer), subject.token_ids, subject, tokenizer, told)


def _check_template(
    name: str, subject: Subject, tokenizer: Any | None, template: Mapping[str, Any] | None
) -> Iterator[CheckFinding]:
    if tokenizer is None or template is None:
        yield CheckFinding.skipped(name, "the model has no chat template")
        return
    expected = partial(chat_ids, tokenizer, **template)
    told = "chats have the tokens of transformers' apply_chat_template"
    yield _compared(name, CHATS, expected, subject.chat_token_ids, subject, tokenizer, told)


def _compared(
    name: str,
    contents: Mapping[str, Any],
    expected: Callable[[Any], list[int] | None],
    ask: Callable[[Any], list[int]],
    subject: Subject,
    tokenizer: Any,
    told: str,
) -> CheckFinding:
    """Compare the tokens of each content with those of transformers, if these are the same each time."""
    known = {key: (content, ids) for key, content in contents.items() if (ids := expected(content))}
    if not known:
        return CheckFinding.skipped(name, "transformers makes no tokens of these prompts")
    finding = _compared_with(name, known, ask, subject, tokenizer, told)
    if finding.status is CheckStatus.WRONG and any(expected(content) != ids for content, ids in known.values()):
        return CheckFinding.skipped(name, UNSETTLED)
    return finding


def _compared_with(
    name: str,
    known: Mapping[str, tuple[Any, list[int]]],
    ask: Callable[[Any], list[int]],
    subject: Subject,
    tokenizer: Any,
    told: str,
) -> CheckFinding:
    """Compare the tokens of each content with those that are known, or their number if they are not shown."""
    try:
        for key, (content, ids) in known.items():
            if (found := ask(content)) != ids:
                return differing_prompt(name, key, found, ids, tokenizer)
        return CheckFinding.right(name, f"{len(known)} {told}")
    except NotShownError as reason:
        for key, (content, ids) in known.items():
            count = subject.num_prompt_tokens(content)
            if count is None:
                return CheckFinding.skipped(name, f"{reason}, and its answers do not tell usage.prompt_tokens")
            if count != len(ids):
                told = f"{key}: usage.prompt_tokens is {count}, transformers has {len(ids)}"
                return CheckFinding.wrong(name, told, f"request {key!r}", *PROMPT_REMEDY)
        told = f"{reason}; usage.prompt_tokens of {len(known)} requests is transformers' number"
        return CheckFinding.right(name, told)


def eos_ids(folder: Path) -> set[int]:
    """The ids that end a sequence, by the files that transformers reads them from."""
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        value = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        if value is not None:
            return set(value) if isinstance(value, list) else {int(value)}
    return set()


def _check_ends(name: str, subject: Subject, folder: Path) -> Iterator[CheckFinding]:
    known = sorted(eos_ids(folder))
    if not known:
        yield CheckFinding.skipped(name, "the model names no token that ends a sequence")
        return
    for token in known:
        if (reason := subject.end_after(token)) != "stop":
            yield CheckFinding.wrong(
                name,
                f"token {token} ends a sequence by the model's files; the model was made to choose it, and the answer "
                f"went on ({reason})",
                f"eos_token_id, token {token}",
                "answers do not end where the model ends them: they run on until max_tokens",
                "compare eos_token_id of generation_config.json and config.json with the original",
            )
            return
    yield CheckFinding.right(name, f"an answer ends at each of the tokens {known}")


def _check_json(name: str, subject: Subject) -> Iterator[CheckFinding]:
    text = subject.shaped_answer()
    if follows_weather_schema(text):
        yield CheckFinding.right(name, f"the answer {text} follows its schema")
        return
    yield CheckFinding.wrong(
        name,
        f"the answer {text!r} does not follow its schema",
        "structured outputs",
        "structured outputs and forced tool calls are not what clients ask for",
        "a tokenizer.json that belongs to the model, whose vocabulary the grammar has; of a server, its options of "
        "structured outputs, and --reasoning-parser if reasoning comes before the answer",
    )
