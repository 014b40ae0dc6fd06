"""Reasoning in generated text: ``<think>...</think>`` before the answer.

::

    BEFORE --<think>--> INSIDE --</think>--> BEHIND --not white space--> ANSWER
       +--------- anything else, unless the prompt opened the mark ----------^

White space around the reasoning is layout and shown in neither part.  ``<think>`` counts at the beginning of the text
only, so that an answer may speak of it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.api.openai.tools.events import partial_suffix

OPEN = "<think>"
CLOSE = "</think>"
PARSERS = ("qwen3", "deepseek_r1")


def begins_inside(parser: str, prompt: str, *, continued: str | None = None, thinking_disabled: bool = False) -> bool:
    """Whether text that follows ``prompt`` is reasoning from its first character on.

    Templates write the opening mark at the prompt's end, or, where thinking is off, both marks.  Where they write none,
    a ``deepseek_r1`` model is taken to reason, and a ``qwen3`` model to open the mark itself.  ``continued`` is the
    message that the model goes on with, if it does.
    """
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    tail = prompt.rstrip()
    if tail.endswith((OPEN, CLOSE)):
        return tail.endswith(OPEN)
    return parser == "deepseek_r1" and not thinking_disabled


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Divides one sequence's text; what it returns, joined, is the same for every split of the text.

    ``inside``: the text begins with reasoning (see ``begins_inside``); an opening mark that the model repeats is
    dropped.
    """

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._state = _State.BEFORE
        self._pending = ""
        self._space = ""  # white space that ends the reasoning, unless more of it follows
        self._has_text = False

    @property
    def has_reasoning(self) -> bool:
        """Whether the text has begun with reasoning, as far as is known."""
        return self._state is not _State.BEFORE and self._inside

    @property
    def in_answer(self) -> bool:
        """Whether what comes next belongs to the answer."""
        return self._state in (_State.BEHIND, _State.ANSWER)

    def feed(self, text: str) -> tuple[str, str]:
        """The next piece -> (reasoning, answer) that are settled now."""
        if self._state is _State.ANSWER:
            return "", text
        if self._state is _State.INSIDE and not self._pending and "<" not in text:
            return self._reasoning(text), ""
        self._pending += text
        if self._state is _State.BEFORE and not self._read_beginning():
            return "", ""
        reasoning = self._read_reasoning() if self._state is _State.INSIDE else ""
        return reasoning, self._read_answer() if self.in_answer else ""

    def finish(self, *, cut_off: bool) -> tuple[str, str]:
        """What was held back.  ``cut_off``: the text ended by a limit, so that half a mark is dropped."""
        pending, self._pending = self._pending, ""
        if cut_off or self._state in (_State.BEHIND, _State.ANSWER):
            return "", ""
        if self._state is _State.BEFORE and not self._inside:
            return "", pending
        return self._reasoning(pending), ""

    def _read_beginning(self) -> bool:
        """Whether it is known what the text begins with."""
        solid = self._pending.lstrip()
        if solid.startswith(OPEN):
            self._state, self._inside, self._pending = _State.INSIDE, True, solid[len(OPEN) :]
        elif OPEN.startswith(solid):
            return False
        else:
            self._state = _State.INSIDE if self._inside else _State.ANSWER
        return True

    def _read_reasoning(self) -> str:
        before, mark, after = self._pending.partition(CLOSE)
        if mark:
            self._state, self._pending = _State.BEHIND, after
            return self._reasoning(before)
        settled = len(before) - partial_suffix(before, CLOSE)
        self._pending = before[settled:]
        return self._reasoning(before[:settled])

    def _reasoning(self, text: str) -> str:
        """``text`` without the white space at both ends of the reasoning."""
        whole = self._space + text if self._has_text else text.lstrip()
        solid = whole.rstrip()
        self._space = whole[len(solid) :]
        self._has_text |= bool(solid)
        return solid

    def _read_answer(self) -> str:
        text = self._pending.lstrip() if self._state is _State.BEHIND else self._pending
        self._pending = ""
        if text:
            self._state = _State.ANSWER
        return text


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """Counts the tokens of reasoning, its marks included: all that come before the answer.

    ``close_id`` is the closing mark as a token, None where it takes several; ``decode`` turns tokens into text.
    """

    close_id: int | None
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: Any) -> ReasoningTokens:
        """By the tokenizer's own vocabulary."""
        token_ids = tokenizer.encode(CLOSE, add_special_tokens=False)
        return cls(token_ids[0] if len(token_ids) == 1 else None, tokenizer.decode)

    def count(self, token_ids: Sequence[int]) -> int:
        """Tokens of an answer that began with reasoning up to the closing mark, or all if it never comes."""
        ids = list(token_ids)
        if self.close_id is not None:
            return ids.index(self.close_id) + 1 if self.close_id in ids else len(ids)
        if CLOSE not in self.decode(ids):
            return len(ids)
        return bisect.bisect_left(range(len(ids)), True, key=lambda end: CLOSE in self.decode(ids[:end]))

    def count_piece(self, token_ids: Sequence[int]) -> int:
        """As ``count``, for the tokens of one piece of a text that has not reached its answer."""
        if self.close_id is not None and self.close_id in token_ids:
            return list(token_ids).index(self.close_id) + 1
        return len(token_ids)
