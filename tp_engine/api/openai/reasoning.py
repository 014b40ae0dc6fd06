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

from tp_engine.api.openai.tools.ernie45 import ResponseMarks
from tp_engine.api.openai.tools.events import MessageFormat, Writing, first_mark, partial_suffix
from tp_engine.api.openai.tools.harmony import ANALYSIS, END, HARMONY

_THINK = (("<think>",), ("</think>",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How some models mark reasoning; each format has a line in ``REASONING_FORMATS``.

    ``help`` describes it in ``--help``.  ``always``: where the prompt has no mark at its end, the text begins with
    reasoning, without an opening mark; otherwise the model writes that mark itself.  ``opens`` and ``closes`` are the
    marks, each in all its spellings.  ``unwrap`` makes what drops further marks around the answer.  ``message``: the
    reasoning is part of a format of whole messages, and ``closes`` only tells where it ends.
    """

    help: str
    always: bool = False
    opens: tuple[str, ...] = _THINK[0]
    closes: tuple[str, ...] = _THINK[1]
    unwrap: Callable[[], ResponseMarks] | None = None
    message: MessageFormat | None = None

    @property
    def has_plain_marks(self) -> bool:
        """Whether the marks are those of most models, which structured outputs know as ``reasoning``."""
        return (self.opens, self.closes) == _THINK

    def begins_inside(self, prompt: str, *, continued: str | None = None, thinking_disabled: bool = False) -> bool:
        """Whether text that follows ``prompt`` is reasoning from its first character on.

        Templates write the opening mark at the prompt's end, or both marks if thinking is off.  ``continued`` is the
        message that the model continues, if any.
        """
        if continued is not None:
            return max(map(continued.rfind, self.opens)) > max(map(continued.rfind, self.closes))
        tail = prompt.rstrip()
        if tail.endswith((*self.opens, *self.closes)):
            return tail.endswith(self.opens)
        return self.always and not thinking_disabled

    def new_parser(self, *, inside: bool) -> ReasoningParser:
        """A parser for one sequence."""
        return ReasoningParser(self, inside=inside)

    def preamble(self, writing: Writing, *, inside: bool) -> str:
        """What comes before an answer that must follow a grammar (``StructuredOutputsParams.preamble``)."""
        opens = " | ".join(map(writing.mark, self.opens))
        start = "thought SPACE? @answer" if inside else f"(SPACE? ({opens}) thought SPACE?)? @answer"
        return f"start: {start}\n{writing.text_until('thought', *self.closes)}\nSPACE: /[ \\n\\r\\t]{{1,64}}/\n"

    def tokens(self, tokenizer: Any) -> ReasoningTokens:
        """A counter of reasoning tokens, by the tokenizer's own vocabulary."""
        token_ids = tokenizer.encode(self.closes[0], add_special_tokens=False)
        is_token = len(token_ids) == len(self.closes) == 1
        return ReasoningTokens(self.closes, token_ids[0] if is_token else None, tokenizer.decode)


# The name that --reasoning-parser takes -> the format.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(help="the model writes <think> itself"),
    "deepseek_r1": ReasoningFormat(help="texts always begin with reasoning", always=True),
    "glm45": ReasoningFormat(help="GLM: as qwen3"),
    "minimax_m2": ReasoningFormat(help="MiniMax: as deepseek_r1", always=True),
    "ernie45": ReasoningFormat(help="ERNIE: as deepseek_r1, then <response>", always=True, unwrap=ResponseMarks),
    "mistral": ReasoningFormat(help="[THINK] in its place", opens=("[THINK]",), closes=("[/THINK]",)),
    "granite": ReasoningFormat(
        help="Granite: Here is my thought process: and Here is my response:, or <think> and <response>",
        opens=("Here is my thought process:", "Here's my thought process:", "<think>"),
        closes=("Here is my response:", "Here's my response:", "</think>"),
        unwrap=ResponseMarks,
    ),
    "openai_gptoss": ReasoningFormat(
        help="gpt-oss: the channel analysis", opens=(ANALYSIS,), closes=(END,), message=HARMONY
    ),
}


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Divides one sequence's text by the marks of ``marks``; the joined results are the same for every split of it.

    ``inside``: the text begins with reasoning (see ``begins_inside``); an opening mark that the model repeats is
    dropped.
    """

    def __init__(self, marks: ReasoningFormat, *, inside: bool) -> None:
        self._opens, self._closes = marks.opens, marks.closes
        self._unwrap = marks.unwrap() if marks.unwrap is not None else None
        self._first_characters = frozenset(mark[0] for mark in self._closes)
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
        reasoning, answer = self._divide(text)
        return reasoning, answer if self._unwrap is None else self._unwrap.feed(answer)

    def _divide(self, text: str) -> tuple[str, str]:
        if self._state is _State.ANSWER:
            return "", text
        if self._state is _State.INSIDE and not self._pending and self._first_characters.isdisjoint(text):
            return self._reasoning(text), ""
        self._pending += text
        if self._state is _State.BEFORE and not self._read_beginning():
            return "", ""
        reasoning = self._read_reasoning() if self._state is _State.INSIDE else ""
        return reasoning, self._read_answer() if self.in_answer else ""

    def finish(self, *, cut_off: bool) -> tuple[str, str]:
        """The reasoning and the answer that were held back.  ``cut_off``: a limit ended the text; drop half a mark."""
        reasoning, answer = self._rest(cut_off=cut_off)
        if self._unwrap is not None:
            answer = self._unwrap.feed(answer) + self._unwrap.finish(cut_off=cut_off)
        return reasoning, answer

    def _rest(self, *, cut_off: bool) -> tuple[str, str]:
        pending, self._pending = self._pending, ""
        if cut_off or self._state in (_State.BEHIND, _State.ANSWER):
            return "", ""
        if self._state is _State.BEFORE and not self._inside:
            return "", pending
        return self._reasoning(pending), ""

    def _read_beginning(self) -> bool:
        """Read the beginning of the text; False if that needs more text."""
        solid = self._pending.lstrip()
        mark = next((one for one in self._opens if solid.startswith(one)), None)
        if mark is not None:
            self._state, self._inside, self._pending = _State.INSIDE, True, solid[len(mark) :]
        elif any(one.startswith(solid) for one in self._opens):
            return False
        else:
            self._state = _State.INSIDE if self._inside else _State.ANSWER
        return True

    def _read_reasoning(self) -> str:
        text, found = self._pending, first_mark(self._pending, self._closes)
        if found is not None:
            place, mark = found
            self._state, self._pending = _State.BEHIND, text[place + len(mark) :]
            return self._reasoning(text[:place])
        settled = len(text) - partial_suffix(text, *self._closes)
        self._pending = text[settled:]
        return self._reasoning(text[:settled])

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

    ``close_id`` is the closing mark as a token, None if it takes several or has several spellings, ``closes``;
    ``decode`` turns tokens into text.
    """

    closes: tuple[str, ...]
    close_id: int | None
    decode: Callable[[list[int]], str]

    def count(self, token_ids: Sequence[int]) -> int:
        """Tokens up to the closing mark of a text that began with reasoning; all of them if the mark never comes."""
        ids = list(token_ids)
        if self.close_id is not None:
            return ids.index(self.close_id) + 1 if self.close_id in ids else len(ids)
        if not self._has_close(ids):
            return len(ids)
        return bisect.bisect_left(range(len(ids)), True, key=lambda end: self._has_close(ids[:end]))

    def count_piece(self, token_ids: Sequence[int]) -> int:
        """As ``count``, for one piece of a text that has not reached its answer."""
        if self.close_id is not None and self.close_id in token_ids:
            return list(token_ids).index(self.close_id) + 1
        return len(token_ids)

    def _has_close(self, ids: list[int]) -> bool:
        text = self.decode(ids)
        return any(mark in text for mark in self.closes)
