"""What a check says of prompts, by a subject and a tokenizer of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tp_engine.apps.check.behaviour import NotShownError, check_behaviour
from tp_engine.apps.check.prompts import UNSETTLED
from tp_engine.apps.check.report import CheckStatus


class Letters:
    """One token per character, behind as many zeros as ``drift`` says."""

    chat_template = "{{ messages }}"

    def __init__(self, drift: Callable[[], int] = lambda: 0) -> None:
        self._drift = drift

    def __call__(self, text: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * self._drift() + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_options: Any) -> str:
        return str(messages[-1]["content"])

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Subject:
    """Tokens as ``Letters`` without drift makes them, or their number alone."""

    def __init__(self, *, are_shown: bool) -> None:
        self._are_shown = are_shown

    def token_ids(self, text: str) -> list[int]:
        if not self._are_shown:
            raise NotShownError("tokens are not shown")
        return [ord(letter) for letter in text]

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.token_ids(str(messages[-1]["content"]))

    def num_prompt_tokens(self, content: str | Sequence[Mapping[str, Any]]) -> int:
        return len(content if isinstance(content, str) else str(content[-1]["content"]))

    def end_after(self, token: int) -> str:
        return "stop"

    def shaped_answer(self) -> str:
        return ""


def counter() -> Callable[[], int]:
    """1, 2, 3, ..."""
    numbers = iter(range(1, 1000))
    return lambda: next(numbers)


@pytest.mark.parametrize("are_shown", [True, False])
@pytest.mark.parametrize(
    ("make_drift", "status"),
    [
        (lambda: lambda: 0, CheckStatus.RIGHT),
        (lambda: lambda: 1, CheckStatus.WRONG),
        (counter, CheckStatus.SKIPPED),
    ],
)
def test_a_prompt_that_is_another_one_each_time_is_no_fault(
    make_drift: Callable[[], Callable[[], int]], status: CheckStatus, are_shown: bool, tmp_path: Path
) -> None:
    """Oracle: transformers' side alone changes.  With a clock in the template or a tokenizer that draws it gives other
    tokens when it is asked again; a fault is one only where it gives the same."""
    subject, tokenizer = Subject(are_shown=are_shown), Letters(make_drift())
    found = {one.name: one for one in check_behaviour(subject, tokenizer, tmp_path, {})}
    for name in ("tokens", "chat template"):
        assert found[name].status is status, found[name]
        assert (UNSETTLED in found[name].detail) == (status is CheckStatus.SKIPPED)
