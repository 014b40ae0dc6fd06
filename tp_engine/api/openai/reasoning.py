"""Reasoning in generated text, such as ``<think>...</think>``, before the answer.

::

    BEFORE --<think>--> INSIDE --</think>--> BEHIND --not white space--> ANSWER
       +--------- anything else, unless the prompt opened the mark ----------^

White space around the reasoning is layout: neither part shows it.  The opening mark counts at the beginning of the text
only, so that an answer may contain it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.api.openai.tools.events import partial_suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How some models mark reasoning; each format has a line in ``REASONING_FORMATS``.

    ``help`` describes it in ``--help``.  ``always``: where the prompt has no mark at its end, the text begins with
    reasoning, without an opening mark; otherwise the model writes that mark itself.  Structured outputs behind
    reasoning know the mark ``</think>`` only (``grammar/reasoning.py``).
    """

    help: str
    always: bool = False
    open: str = "<think>"
    close: str = "</think>"

    def begins_inside(self, prompt: str, *, continued: str | None = None, thinking_disabled: bool = False) -> bool:
        """Whether text that follows ``prompt`` is reasoning from its first character on.

        Templates write the opening mark at the prompt's end, or both marks if thinking is off.  ``continued`` is the
        message that the model continues, if any.
        """
        if continued is not None:
            return continued.rfind(self.open) > continued.rfind(self.close)
        tail = prompt.rstrip()
        if tail.endswith((self.open, self.close)):
            return tail.endswith(self.open)
        return self.always and not thinking_disabled

    def new_parser(self, *, inside: bool) -> ReasoningParser:
        """A parser for one sequence."""
        return ReasoningParser(self.open, self.close, inside=inside)

    def tokens(self, tokenizer: Any) -> ReasoningTokens:
        """A counter of reasoning tokens, by the tokenizer's own vocabulary."""
        token_ids = tokenizer.encode(self.close, add_special_tokens=False)
        return ReasoningTokens(self.close, token_ids[0] if len(token_ids) == 1 else None, tokenizer.decode)


# The name that --reasoning-parser takes -> the format.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(help="the model writes <think> itself"),
    "deepseek_r1": ReasoningFormat(help="texts always begin with reasoning", always=True),
}


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Divides one sequence's text; the joined results are the same for every split of the text.

    ``inside``: the text begins with reasoning (see ``begins_inside``); an opening mark that the model repeats is
    dropped.
    """

    def __init__(self, open_mark: str, close_mark: str, *, inside: bool) -> None:
        self._open, self._close = open_mark, close_mark
        self._inside = inside
        self._state = _State.BEFORE
        self._pending = ""
        self._space = ""  # white space at the end of the reasoning, given out if more reasoning follows
        self._has_text = False

    @property
    def has_reasoning(self) -> bool:
        """Whether the text is known to begin with reasoning."""
        return self._state is not _State.BEFORE and self._inside

    @property
    def in_answer(self) -> bool:
        """Whether the next text belongs to the answer."""
        return self._state in (_State.BEHIND, _State.ANSWER)

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns the reasoning and the answer that are certain now."""
        if self._state is _State.ANSWER:
            return "", text
        if self._state is _State.INSIDE and not self._pending and self._close[0] not in text:
            return self._reasoning(text), ""
        self._pending += text
        if self._state is _State.BEFORE and not self._read_beginning():
            return "", ""
        reasoning = self._read_reasoning() if self._state is _State.INSIDE else ""
        return reasoning, self._read_answer() if self.in_answer else ""

    def finish(self, *, cut_off: bool) -> tuple[str, str]:
        """The reasoning and the answer that were held back.  ``cut_off``: a limit ended the text; drop half a mark."""
        pending, self._pending = self._pending, ""
        if cut_off or self._state in (_State.BEHIND, _State.ANSWER):
            return "", ""
        if self._state is _State.BEFORE and not self._inside:
            return "", pending
        return self._reasoning(pending), ""

    def _read_beginning(self) -> bool:
        """Read the beginning of the text; False if that needs more text."""
        solid = self._pending.lstrip()
        if solid.startswith(self._open):
            self._state, self._inside, self._pending = _State.INSIDE, True, solid[len(self._open) :]
        elif self._open.startswith(solid):
            return False
        else:
            self._state = _State.INSIDE if self._inside else _State.ANSWER
        return True

    def _read_reasoning(self) -> str:
        before, mark, after = self._pending.partition(self._close)
        if mark:
            self._state, self._pending = _State.BEHIND, after
            return self._reasoning(before)
        settled = len(before) - partial_suffix(before, self._close)
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

    ``close_id`` is the closing mark ``close`` as a token, None if it takes several; ``decode`` turns tokens into text.
    """

    close: str
    close_id: int | None
    decode: Callable[[list[int]], str]

    def count(self, token_ids: Sequence[int]) -> int:
        """Tokens up to the closing mark of a text that began with reasoning; all of them if the mark never comes."""
        ids = list(token_ids)
        if self.close_id is not None:
            return ids.index(self.close_id) + 1 if self.close_id in ids else len(ids)
        if self.close not in self.decode(ids):
            return len(ids)
        return bisect.bisect_left(range(len(ids)), True, key=lambda end: self.close in self.decode(ids[:end]))

    def count_piece(self, token_ids: Sequence[int]) -> int:
        """As ``count``, for one piece of a text that has not reached its answer."""
        if self.close_id is not None and self.close_id in token_ids:
            return list(token_ids).index(self.close_id) + 1
        return len(token_ids)
