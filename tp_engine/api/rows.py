"""The rows of a call of ``LLM``: prompts and what comes with each, from lists, arrays or generators; which row an error
is about."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

from tp_engine.api.input_processor import Prompt, is_token_id
from tp_engine.errors import RequestError, did_you_mean, shown
from tp_engine.options.fields import unboxed
from tp_engine.requests.request import EngineRequest

_WITH_LISTS = ("content", "tool_calls")  # of a message
_TOKENIZATION = "tokenization_kwargs"
_TOKENIZATION_KEYS = ("add_special_tokens", "truncation", "max_length", "truncation_side", "truncate_prompt_tokens")

Make: TypeAlias = Callable[..., tuple[EngineRequest, str | None]]
"""The request of one row, and the text of its prompt if it came as text."""


@dataclass(slots=True)
class Row:
    """The ``number``-th row: its request, or the error that it has instead."""

    number: int
    request: EngineRequest | None = None
    text: str | None = None
    error: RequestError | None = None


class Rows:
    """Rows that are made as they are asked for, by ``make(item, one of each column)``.

    ``size`` is None if ``items`` does not tell it, as a generator.  Errors name the row, ``name[number]``, unless the
    call ``is_one``.
    """

    def __init__(
        self, name: str, items: Iterable[Any], make: Make, columns: Mapping[str, Any], *, is_one: bool = False
    ) -> None:
        self.name, self._is_one, self._make = name, is_one, make
        self.size = len(items) if isinstance(items, Sized) else None
        self._items = items
        self._columns = [for_each(column, given, self.size) for column, given in columns.items()]
        self._names = list(columns)

    def __iter__(self) -> Iterator[Row]:
        columns = [iter(column) for column in self._columns]
        for number, item in enumerate(self._items):
            try:
                given = [self._next(column, name, number) for column, name in zip(columns, self._names, strict=True)]
                yield Row(number, *self._make(item, *given))
            except RequestError as error:
                yield Row(number, error=self.naming(error, number))

    def naming(self, error: RequestError, number: int) -> RequestError:
        """``error`` with the row named in its message and its ``param``."""
        if not self._is_one:
            place = f"{self.name}[{number}]"
            error.args = (f"{place}: {error}",)
            error.param = place if error.param in (None, "prompt") else f"{place}.{error.param}"
        error.row = number
        return error

    @staticmethod
    def _next(column: Iterator[Any], name: str, number: int) -> Any:
        try:
            return next(column)
        except StopIteration:
            raise RequestError(f"there are {number} {name} for more prompts; give one for each", param=name) from None


def as_batch(prompts: Any) -> tuple[Iterable[Prompt], bool]:
    """One prompt or many, and whether it is one; a flat list or array of numbers is one prompt of token ids.  A
    generator stays one."""
    if prompts is None:
        raise RequestError("prompts is missing; give a prompt, or a list of prompts", param="prompts")
    prompts = unboxed(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        kind = type(prompts).__name__
        raise RequestError(f"prompts is of type {kind}; it must be a prompt, or a list of prompts", param="prompts")
    if isinstance(prompts, Iterator):
        first = list(itertools.islice(prompts, 1))
        if not (first and is_token_id(first[0])):
            return itertools.chain(first, prompts), False
        prompts = itertools.chain(first, prompts)
    batch: list[Any] = list(prompts)
    if batch and is_token_id(batch[0]):
        return [batch], True
    return batch, False


def as_conversations(messages: Any) -> tuple[Iterable[Any], bool]:
    """One conversation or many, and whether it is one.  A generator stays one."""
    messages = unboxed(messages)
    if not isinstance(messages, Iterable) or isinstance(messages, (str, bytes, Mapping)):
        kind = type(messages).__name__
        raise RequestError(f"messages is of type {kind}; it must be a list of messages, or of such", param="messages")
    if isinstance(messages, Iterator):
        first = list(itertools.islice(messages, 1))
        if not (first and isinstance(first[0], Mapping)):
            return itertools.chain(first, messages), False
        messages = itertools.chain(first, messages)
    conversations: list[Any] = list(messages)
    if conversations and isinstance(conversations[0], Mapping):
        return [conversations], True
    return conversations, False


def with_lists(conversation: Any) -> Any:
    """A conversation whose messages, and their parts and calls, are lists where they are arrays, as in what
    pandas reads of parquet, or iterators."""
    messages = _listed(conversation)
    if not isinstance(messages, (list, tuple)) or not all(isinstance(one, Mapping) for one in messages):
        return messages
    return [{**one, **{name: _listed(one[name]) for name in _WITH_LISTS if name in one}} for one in messages]


def _listed(given: Any) -> Any:
    given = unboxed(given)
    return list(given) if isinstance(given, Iterator) else given


def for_each(name: str, given: Any, num_rows: int | None) -> Iterable[Any]:
    """One value for all rows, or one for each."""
    given = unboxed(given)
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        return itertools.repeat(given)
    if num_rows is None:
        return given
    found = list(itertools.islice(given, num_rows + 1))  # it may have no end
    if len(found) != num_rows:
        count = f"more than {num_rows}" if len(found) > num_rows else f"{len(found)}"
        raise RequestError(f"{count} {name} for {num_rows} prompts; give one for all, or one for each", param=name)
    return found


def tokenization_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``tokenization_kwargs``, vLLM's name, mean as keywords of ``InputProcessor.process``; raises
    ``RequestError`` for what cannot be obeyed."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{_TOKENIZATION} is of type {type(given).__name__}; it must be a mapping", param=_TOKENIZATION
        )
    given = {name: unboxed(value) for name, value in given.items()}
    if unknown := next((name for name in given if name not in _TOKENIZATION_KEYS), None):
        known = ", ".join(_TOKENIZATION_KEYS)
        near = did_you_mean(str(unknown), _TOKENIZATION_KEYS)
        raise RequestError(f"{_TOKENIZATION} has {shown(unknown)}; it can have {known}{near}", param=_TOKENIZATION)
    options: dict[str, Any] = {}
    if (adds := given.get("add_special_tokens")) is not None:
        if not isinstance(adds, bool):
            raise RequestError(f"add_special_tokens is {shown(adds)}; it must be True or False", param=_TOKENIZATION)
        options["add_special_tokens"] = adds
    longest = given.get("truncate_prompt_tokens")
    if given.get("truncation") not in (None, False):
        longest = given.get("max_length", -1 if longest is None else longest)
    elif given.get("max_length") is not None:
        raise RequestError("max_length cuts nothing without truncation=True; set both", param=_TOKENIZATION)
    side = given.get("truncation_side", "right" if given.get("truncation") else None)
    if side not in (None, "left", "right"):
        raise RequestError(f"truncation_side is {shown(side)}; it must be left or right", param=_TOKENIZATION)
    if longest is not None:
        options["truncate_prompt_tokens"] = longest
        options["truncation_side"] = side or "left"
    return options
