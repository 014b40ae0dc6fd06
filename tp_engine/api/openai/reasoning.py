"""Reasoning in generated text, such as ``<think>...</think>``, before the answer.

::

    BEFORE --<think>--> INSIDE --</think>--> BEHIND --not white space--> ANSWER
       |                  +-- <tool_call> --> LOOKING --</think>--> BEHIND  ^
       |                                         +-- a call has begun ------+
       +--------- anything else, unless the prompt opened the mark ---------+

White space around the reasoning is layout: neither part shows it.  The opening mark counts at the beginning of the text
only, and the closing mark up to the beginning of the answer, so that an answer may contain them.  A model that calls a
tool may forget the closing mark, so the opening mark of a call ends the reasoning, if a call follows it: reasoning may
speak about such marks.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.ernie45 import OPEN as RESPONSE
from tp_engine.api.openai.tools.ernie45 import ResponseMarks
from tp_engine.api.openai.tools.events import (
    CallStarted,
    ChatEvent,
    ContentText,
    MessageFormat,
    TemplateMarks,
    ToolParser,
)
from tp_engine.api.openai.tools.formats import COHERE_RESPONSE, GEMMA_DROPS
from tp_engine.api.openai.tools.harmony import ANALYSIS, END, HARMONY
from tp_engine.api.openai.tools.harmony import TEMPLATE as HARMONY_TEMPLATE
from tp_engine.api.openai.tools.text_parser import first_mark, partial_suffix

if TYPE_CHECKING:
    from tp_engine.api.openai.structured import TokenWriting  # pydantic, which options are read without


class Beginning(enum.Enum):
    """What a text begins with, as far as its prompt tells.

    ``REASONING``: it goes on with reasoning that the prompt has opened.  ``EITHER``: the model opens reasoning itself,
    or answers.  ``ANSWER``: thinking is switched off, or the prompt has closed it.
    """

    REASONING = enum.auto()
    EITHER = enum.auto()
    ANSWER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How some models mark reasoning; each format has a line in ``REASONING_FORMATS``.

    ``help`` describes it in ``--help``.  ``always``: where the prompt has no mark at its end, the text begins with
    reasoning, without an opening mark; otherwise the model writes that mark itself.  ``opens`` and ``closes`` are the
    marks, each in all its spellings, longer ones first; a text may also begin with one of ``bare_opens``, which are
    looked for first.  ``unwrap`` makes what drops further marks around the answer; the answer never shows ``drops``,
    unless it follows a grammar.  ``aliases`` are other names of vLLM and SGLang.  A chat template that one of
    ``template`` fits is of such a model.  ``message``: the reasoning is part of a format of whole messages, and
    ``closes`` only tells where it ends.
    """

    help: str
    always: bool = False
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    bare_opens: tuple[str, ...] = ()
    unwrap: Callable[[], ResponseMarks] | None = None
    drops: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    template: tuple[TemplateMarks, ...] = ()
    message: MessageFormat | None = None

    def beginning(self, prompt: str, *, continued: str | None = None, thinking_disabled: bool = False) -> Beginning:
        """Return what a text that follows ``prompt`` begins with.

        Templates write the opening mark at the prompt's end, or both marks if thinking is off.  ``continued`` is the
        message that the model continues, if any.
        """
        if continued is not None and continued.strip():
            is_open = max(map(continued.rfind, self.opens)) > max(map(continued.rfind, self.closes))
            return Beginning.REASONING if is_open else Beginning.ANSWER
        tail = prompt.rstrip()
        if self.unwrap is not None:
            tail = tail.removesuffix(RESPONSE).rstrip()
        if tail.endswith(self.opens):
            return Beginning.REASONING
        if tail.endswith(self.closes) or thinking_disabled:
            return Beginning.ANSWER
        return Beginning.REASONING if self.always else Beginning.EITHER

    def new_parser(self, begins: Beginning, calls: CallsInReasoning | None = None) -> ReasoningParser:
        """Return a parser for one sequence; ``calls`` finds calls that end its reasoning."""
        return ReasoningParser(self, begins, calls)

    def preamble(self, writing: TokenWriting, begins: Beginning) -> str | None:
        """Return what comes before an answer that must follow a grammar (``StructuredOutputsParams.preamble``), if
        anything.

        White space comes behind reasoning only: in front of it, it would leave the model no choice but to think.
        """
        if begins is Beginning.ANSWER:
            return None
        opens = " | ".join(map(writing.mark, self.opens))
        start = "thought space @answer" if begins is Beginning.REASONING else f"(({opens}) thought space)? @answer"
        return f"start: {start}\n{writing.text_until('thought', *self.closes)}\n"

    def tokens(self, tokenizer: Any) -> ReasoningTokens:
        """Return a counter of reasoning tokens, by the tokenizer's own vocabulary."""
        token_ids = tokenizer.encode(self.closes[0], add_special_tokens=False)
        is_token = len(token_ids) == len(self.closes) == 1
        return ReasoningTokens(self.closes, token_ids[0] if is_token else None, tokenizer.decode)


_GRANITE_ROLE = "<|start_of_role|>"
# The name that --reasoning-parser takes -> the format.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(
        help="the model writes <think> itself, or the template does",
        aliases=(
            "qwen3-thinking",
            "interns1",
            "nanbeige",
            "deepseek_v3",
            "deepseek-v3",
            "holo2",
            "kimi_k2",
            "nemotron_v3",
            "nemotron_3",
            "olmo3",
        ),
        template=(TemplateMarks(("</think>",), lacks=(RESPONSE, _GRANITE_ROLE, "<mm:think>", "<minimax:tool_call>")),),
    ),
    "deepseek_r1": ReasoningFormat(
        help="texts always begin with reasoning", always=True, aliases=("deepseek-r1", "step3")
    ),
    "glm45": ReasoningFormat(help="GLM: as qwen3", aliases=("glm47",)),
    "minimax_m2": ReasoningFormat(
        help="MiniMax: as deepseek_r1",
        always=True,
        aliases=("minimax",),
        template=(TemplateMarks(("<minimax:tool_call>", "<think>"), lacks=("]<]minimax[>[",)),),
    ),
    "ernie45": ReasoningFormat(
        help="ERNIE: as deepseek_r1, then <response>",
        always=True,
        unwrap=ResponseMarks,
        template=(TemplateMarks(("<think>", RESPONSE, "<tool_call>"), lacks=("<minimax:tool_call>", _GRANITE_ROLE)),),
    ),
    "mistral": ReasoningFormat(
        help="[THINK] in its place",
        opens=("[THINK]",),
        closes=("[/THINK]",),
        template=(TemplateMarks(("[THINK]",)),),
    ),
    "gemma4": ReasoningFormat(
        help="Gemma 4: the channel thought",
        opens=("<|channel>thought", "<|channel>"),
        closes=("<channel|>",),
        bare_opens=("<|channel><|channel>thought", "thought\n"),
        drops=GEMMA_DROPS,
        template=(TemplateMarks(("<|channel>",)),),
    ),
    "seed_oss": ReasoningFormat(
        help="Seed-OSS: <seed:think>",
        opens=("<seed:think>",),
        closes=("</seed:think>",),
        template=(TemplateMarks(("<seed:think>",)),),
    ),
    "cohere_command3": ReasoningFormat(
        help="Command: <|START_THINKING|>",
        opens=("<|START_THINKING|>",),
        closes=("<|END_THINKING|>",),
        unwrap=partial(ResponseMarks, *COHERE_RESPONSE),
        template=(TemplateMarks(("<|START_THINKING|>", COHERE_RESPONSE[0])),),
    ),
    "granite": ReasoningFormat(
        help="Granite: Here is my thought process: and Here is my response:, or <think> and <response>",
        opens=("Here is my thought process:", "Here's my thought process:", "<think>"),
        closes=("Here is my response:", "Here's my response:", "</think>"),
        unwrap=ResponseMarks,
        template=(TemplateMarks((_GRANITE_ROLE, "<think>")), TemplateMarks(("Here is my thought process",))),
    ),
    "openai_gptoss": ReasoningFormat(
        help="gpt-oss: the channel analysis",
        opens=(ANALYSIS,),
        closes=(END,),
        aliases=("gpt-oss",),
        template=HARMONY_TEMPLATE,
        message=HARMONY,
    ),
}
REASONING_ALIASES = {alias: name for name, reasoning in REASONING_FORMATS.items() for alias in reasoning.aliases}


class CallsInReasoning(ToolParser):
    """The parser of a model's calls, which may begin inside of reasoning.

    A call there ends the reasoning.  Then its closing mark may come late, in the content, which does not show it.
    """

    def __init__(self, new_parser: Callable[[], ToolParser], marks: tuple[str, ...], closes: tuple[str, ...]) -> None:
        self.marks = marks
        self._new_parser = new_parser
        self._parser = new_parser()
        self._found: list[ChatEvent] = []
        self._late = closes
        self._is_late = False  # a closing mark may come
        self._held = ""  # the beginning of one

    def look(self, text: str) -> tuple[str, bool]:
        """Take the next piece of reasoning; returns what surely is, and whether a call has begun behind that."""
        events = self._parser.feed(text)
        started = next((place for place, event in enumerate(events) if isinstance(event, CallStarted)), len(events))
        self._found, self._is_late = events[started:], started < len(events)
        return _content(events[:started]), self._is_late

    def end(self) -> str:
        """End the reasoning without a call; returns what was held back."""
        events, self._parser = self._parser.finish(cut_off=False), self._new_parser()
        return _content(events)

    def feed(self, text: str) -> list[ChatEvent]:
        found, self._found = self._found, []
        return self._shown(found + self._parser.feed(text))

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        return self._shown(self._parser.finish(cut_off=cut_off)) + self._released()

    def _shown(self, events: list[ChatEvent]) -> list[ChatEvent]:
        """``events`` without a late closing mark."""
        if not self._is_late:
            return events
        shown: list[ChatEvent] = []
        for event in events:
            shown += self._without_mark(event.text) if isinstance(event, ContentText) else [*self._released(), event]
        return shown

    def _without_mark(self, text: str) -> list[ChatEvent]:
        text = self._held + text
        found = first_mark(text, self._late) if self._is_late else None
        held = partial_suffix(text, *self._late) if self._is_late and found is None else 0
        if found is not None:
            self._is_late = False
            text = text[: found[0]] + text[found[0] + len(found[1]) :]
        self._held = text[len(text) - held :]
        text = text[: len(text) - held]
        return [ContentText(text)] if text else []

    def _released(self) -> list[ChatEvent]:
        text, self._held = self._held, ""
        return [ContentText(text)] if text else []


def _content(events: Sequence[ChatEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


class _TextPlace(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    LOOKING = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Divides one sequence's text by the marks of ``marks``; the joined results are the same for every split of it.

    An opening mark is read also where the prompt has opened the reasoning, or has closed it, and a closing mark also
    in front of an answer: models repeat them.
    ``num_characters`` are those of the reasoning and its marks, known once a call of ``calls`` has ended it.
    """

    def __init__(self, marks: ReasoningFormat, begins: Beginning, calls: CallsInReasoning | None = None) -> None:
        self._opens, self._closes = (*marks.bare_opens, *marks.opens), marks.closes
        self._unwrap = marks.unwrap() if marks.unwrap is not None else None
        self._calls = calls
        self._ends = self._closes if calls is None else (*self._closes, *calls.marks)
        self._first_characters = frozenset(mark[0] for mark in self._ends)
        self._inside = begins is Beginning.REASONING
        self._state = _TextPlace.BEFORE
        self._pending = ""
        self._space = ""  # white space at the end of the reasoning, given out if more reasoning follows
        self._has_text = False
        self._num_read = 0  # characters that are no longer pending
        self._num_looked = 0  # up to the opening mark of what may be a call, and the mark
        self.num_characters: int | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether the text is known to begin with reasoning."""
        return self._state is not _TextPlace.BEFORE and self._inside

    @property
    def in_answer(self) -> bool | None:
        """Whether the next text belongs to the answer; None if it may belong to a call."""
        return None if self._state is _TextPlace.LOOKING else self._state in (_TextPlace.BEHIND, _TextPlace.ANSWER)

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece; returns the reasoning and the answer that are certain now."""
        reasoning, answer = self._divide(text)
        return reasoning, answer if self._unwrap is None else self._unwrap.feed(answer)

    def _divide(self, text: str) -> tuple[str, str]:
        if self._state is _TextPlace.ANSWER:
            return "", text
        if self._state is _TextPlace.INSIDE and not self._pending and self._first_characters.isdisjoint(text):
            self._num_read += len(text)
            return self._reasoning(text), ""
        self._pending += text
        if self._state is _TextPlace.BEFORE and not self._read_beginning():
            return "", ""
        reasoning = self._read_reasoning() if self._state in (_TextPlace.INSIDE, _TextPlace.LOOKING) else ""
        return reasoning, self._read_answer() if self.in_answer else ""

    def finish(self, *, cut_off: bool) -> tuple[str, str]:
        """Return the reasoning and the answer that were held back.  ``cut_off``: a limit ended the text; drop half a
        mark."""
        reasoning, answer = self._rest(cut_off=cut_off)
        if self._unwrap is not None:
            answer = self._unwrap.feed(answer) + self._unwrap.finish(cut_off=cut_off)
        return reasoning, answer

    def _rest(self, *, cut_off: bool) -> tuple[str, str]:
        pending, self._pending = self._pending, ""
        if cut_off:
            return "", ""
        if self.in_answer or (self._state is _TextPlace.BEFORE and not self._inside):
            return "", pending
        if self._state is _TextPlace.LOOKING and self._calls is not None:
            pending = self._calls.look(pending)[0] + self._calls.end()
        return self._reasoning(pending), ""

    def _read_beginning(self) -> bool:
        """Read the beginning of the text; False if that needs more text."""
        solid = self._pending.lstrip()
        closes = () if self._inside else self._closes
        if any(one != solid and one.startswith(solid) for one in (*self._opens, *closes)):
            return False
        mark = next((one for one in self._opens if solid.startswith(one)), None)
        if mark is not None:
            self._state, self._inside = _TextPlace.INSIDE, True
            self._read(len(self._pending) - len(solid) + len(mark))
        elif solid.startswith(closes):
            self._state = _TextPlace.BEHIND
        else:
            self._state = _TextPlace.INSIDE if self._inside else _TextPlace.ANSWER
        return True

    def _read(self, size: int) -> str:
        """Take ``size`` characters of the pending text."""
        text, self._pending = self._pending[:size], self._pending[size:]
        self._num_read += size
        return text

    def _read_reasoning(self) -> str:
        """Read up to the end of the reasoning, or of the pending text."""
        shown = ""
        while self._state in (_TextPlace.INSIDE, _TextPlace.LOOKING):
            ends = self._closes if self._state is _TextPlace.LOOKING else self._ends
            found = first_mark(self._pending, ends)
            text = self._read(len(self._pending) - partial_suffix(self._pending, *ends) if found is None else found[0])
            shown += self._looked(text) if self._state is _TextPlace.LOOKING else self._reasoning(text)
            if found is None or self.num_characters is not None:
                break
            if found[1] in self._closes:
                self._read(len(found[1]))
                if self._state is _TextPlace.LOOKING and self._calls is not None:
                    shown += self._reasoning(self._calls.end())
                self._state = _TextPlace.BEHIND
            else:
                self._state, self._num_looked = _TextPlace.LOOKING, self._num_read + len(found[1])
        return shown

    def _looked(self, text: str) -> str:
        """Reasoning out of ``text``, behind the opening mark of a call."""
        assert self._calls is not None
        shown, has_call = self._calls.look(text)
        if has_call:
            self._state, self._unwrap, self.num_characters = _TextPlace.ANSWER, None, self._num_looked
        return self._reasoning(shown)

    def _reasoning(self, text: str) -> str:
        """``text`` without the white space at both ends of the reasoning."""
        whole = self._space + text if self._has_text else text.lstrip()
        solid = whole.rstrip()
        self._space = whole[len(solid) :]
        self._has_text |= bool(solid)
        return solid

    def _read_answer(self) -> str:
        text, self._pending = self._pending, ""
        while self._state is _TextPlace.BEHIND:
            text = text.lstrip()
            mark = next((one for one in self._closes if text.startswith(one)), None)
            if mark is not None:
                text = text[len(mark) :]
            elif any(one.startswith(text) for one in self._closes):
                self._pending, text = text, ""
                break
            else:
                self._state = _TextPlace.ANSWER
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

    def count(self, token_ids: Sequence[int], num_characters: int | None = None) -> int:
        """Tokens up to the closing mark of a text that began with reasoning; all of them if the mark never comes.

        ``num_characters``: a call has ended the reasoning, which has so many with the call's opening mark.
        """
        ids = list(token_ids)
        if num_characters is not None:
            return self._first(ids, lambda text: len(text) >= num_characters)
        if self.close_id is not None:
            return ids.index(self.close_id) + 1 if self.close_id in ids else len(ids)
        return self._first(ids, lambda text: any(mark in text for mark in self.closes))

    def count_piece(self, token_ids: Sequence[int]) -> int:
        """Do as ``count``, for one piece of a text that has not reached its answer."""
        if self.close_id is not None and self.close_id in token_ids:
            return list(token_ids).index(self.close_id) + 1
        return len(token_ids)

    def _first(self, ids: list[int], holds: Callable[[str], bool]) -> int:
        """The number of the first tokens whose text ``holds``; all of them if it never does."""
        return bisect.bisect_left(range(len(ids)), True, key=lambda end: holds(self.decode(ids[:end])))
