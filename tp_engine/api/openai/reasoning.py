"""Reasoning in generated text, such as ``<think>...</think>``, before the answer.

White space around the reasoning is layout that neither part shows.  The opening mark counts only at the start of the
text, and the closing mark up to the beginning of the answer, so that an answer may contain them.  A model that calls a
tool may forget the closing mark, so the opening mark of a call ends the reasoning, if a call follows it: reasoning may
speak about such marks.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.ernie45 import OPEN as RESPONSE
from tp_engine.api.openai.tools.ernie45 import ResponseMarks
from tp_engine.api.openai.tools.events import CallStarted, ChatEvent, ContentText
from tp_engine.api.openai.tools.harmony import ANALYSIS, END, HARMONY
from tp_engine.api.openai.tools.harmony import TEMPLATE as HARMONY_TEMPLATE
from tp_engine.api.openai.tools.hy3 import version_of
from tp_engine.api.openai.tools.marks import COHERE_RESPONSE, GEMMA_DROPS, SOLAR_END, SOLAR_HEADS
from tp_engine.api.openai.tools.text_parser import (
    EndOfTextError,
    MessageParser,
    Reading,
    TextParser,
    first_mark,
    num_settled,
)
from tp_engine.api.openai.tools.tool_format import MessageFormat, TemplateMarks

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.token_writing import TokenWriting


class Beginning(enum.Enum):
    """What a text begins with, according to its prompt.

    ``REASONING``: it continues reasoning that the prompt has opened.  ``EITHER``: the model opens reasoning itself,
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
    looked for first.  One of ``heads``, longer ones first, may precede the answer.  ``unwrap`` makes a reader that
    drops further marks around the answer; the answer never shows ``drops``, unless it follows a grammar.  ``aliases``
    are other names in vLLM and SGLang.  A chat template that matches one of ``template`` is of such a model.
    ``message``: the reasoning is part of a format of whole messages, and ``closes`` only says where it ends.
    ``of_tokens`` makes the format of the version that a tokenizer's own tokens indicate.
    """

    help: str
    always: bool = False
    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    bare_opens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    unwrap: Callable[[], ResponseMarks] | None = None
    drops: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    template: tuple[TemplateMarks, ...] = ()
    message: MessageFormat | None = None
    of_tokens: Callable[[Iterable[str]], ReasoningFormat] | None = None

    def for_tokens(self, tokens: Iterable[str]) -> ReasoningFormat:
        """This format, as written by a model whose tokenizer has these tokens in angle brackets."""
        return self if self.of_tokens is None else self.of_tokens(tokens)

    def beginning(self, prompt: str, *, continued: str | None = None, thinking_disabled: bool = False) -> Beginning:
        """What a text that follows ``prompt`` begins with.

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

    def preamble(
        self, writing: TokenWriting, begins: Beginning, budget: int | None = None, answer: str = "@answer"
    ) -> str | None:
        """What comes before an ``answer`` that must follow a grammar (``StructuredOutputsParams.preamble``), if
        anything; the reasoning has at most ``budget`` tokens, for a format that ``limits`` it.

        White space comes only after reasoning: before it, it would leave the model no choice but to think.
        """
        if begins is Beginning.ANSWER:
            return None
        close = writing.token_id(self.closes[0])
        rule = writing.text_until("thought", *self.closes) if budget is None else _at_most(budget, close)
        opens, heads = (" | ".join(map(writing.mark, marks)) for marks in (self.opens, self.heads))
        thought = f"thought ({heads})? space" if heads else "thought space"
        either = f"({opens}) {thought} | {heads}" if heads else f"({opens}) {thought}"
        start = f"{thought} {answer}" if begins is Beginning.REASONING else f"({either})? {answer}"
        return f"start: {start}\n{rule}\n"

    def limits(self, writing: TokenWriting) -> bool:
        """Whether a grammar can end the reasoning after some tokens: its marks must be one token each."""
        is_one = len(self.closes) == 1 and writing.token_id(self.closes[0]) is not None
        return is_one and self.message is None and self._open_id(writing) is not None

    def limited(self, writing: TokenWriting, begins: Beginning, budget: int) -> str | None:
        """The grammar of any answer after at most ``budget`` tokens of reasoning; None if there is none."""
        if begins is Beginning.ANSWER:
            return None
        close, opens = writing.token_id(self.closes[0]), self._open_id(writing)
        begin = "thought any" if begins is Beginning.REASONING else f"(<[{opens}]> thought any | <[^{opens}]> any)?"
        return f"start: {begin}\n{_at_most(budget, close)}\nany: (<[{close}]> | <[^{close}]>)*\n"

    def _open_id(self, writing: TokenWriting) -> int | None:
        """The token that opens the reasoning."""
        return next((found for mark in self.opens if (found := writing.token_id(mark)) is not None), None)

    def tokens(self, tokenizer: Any) -> ReasoningTokens:
        """A counter of reasoning tokens, by the tokenizer's own vocabulary."""
        token_ids = tokenizer.encode(self.closes[0], add_special_tokens=False)
        is_token = len(token_ids) == len(self.closes) == 1
        return ReasoningTokens(self.closes, token_ids[0] if is_token else None, tokenizer.decode)


def _at_most(budget: int, close: int | None) -> str:
    """The rule ``thought``: at most ``budget`` tokens, and the one that closes it."""
    return f"thought: <[^{close}]>{{0,{budget}}} <[{close}]>"


def _hy3(tokens: Iterable[str] = ()) -> ReasoningFormat:
    version = version_of(tokens)
    named = (version,) if version else ()
    return ReasoningFormat(
        help="Hy3: <think:opensource>, or as qwen3",
        opens=tuple(f"<think{one}>" for one in (*named, "")),
        closes=tuple(f"</think{one}>" for one in (*named, "")),
        template=(TemplateMarks(("<tool_sep", "<arg_key", "<think"), lacks=("</think>",)),),
        of_tokens=_hy3,
    )


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
            "deepseek_v4",
            "holo2",
            "kimi_k2",
            "nemotron_v3",
            "nemotron_3",
            "olmo3",
            "poolside_v1",
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
    "hy_v3": _hy3(),
    "solar_open": ReasoningFormat(
        help="Solar Open: <|think|>",
        opens=("<|think|>",),
        closes=(SOLAR_END,),
        heads=SOLAR_HEADS,
        drops=(SOLAR_END,),
        template=(TemplateMarks(("<|think|>", "<|tool_call:begin|>")),),
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


class ReasoningParser(MessageParser):
    """Divides one sequence's text by ``marks``, and passes the answer to another parser.

    ``marks`` None: all text is the answer.  ``new_answer`` makes the parser of the answer; None: all of it is content.
    An opening mark is read also where the prompt has opened the reasoning, or has closed it, and a closing mark also
    before an answer: models repeat them.  One of ``calls`` begins what may be a call within reasoning.  A call
    ends the reasoning; then the closing mark may come late, in the content, which does not show it.
    """

    def __init__(
        self,
        marks: ReasoningFormat | None,
        begins: Beginning,
        new_answer: Callable[[], TextParser] | None = None,
        calls: tuple[str, ...] = (),
    ) -> None:
        self._closes = () if marks is None else marks.closes
        self._heads = () if marks is None else marks.heads
        super().__init__((*self._closes, *calls))
        self._starts = () if marks is None else (*marks.bare_opens, *marks.opens)
        self._unwrap = marks.unwrap() if marks is not None and marks.unwrap is not None else None
        self._new_answer = new_answer
        self._answer = None if new_answer is None else new_answer()
        self._inside = begins is Beginning.REASONING
        self._num_fed = 0
        self._is_late = False  # a closing mark may come in the content
        self._held = ""  # the beginning of such a mark
        self.in_answer = marks is None

    def feed(self, text: str) -> list[ChatEvent]:
        self._num_fed += len(text)
        return super().feed(text)

    def finish(self, *, cut_off: bool) -> list[ChatEvent]:
        if not cut_off:
            self._has_ended = True
            with suppress(EndOfTextError):
                next(self._reading)
        if self._unwrap is not None:
            self._show(self._unwrap.finish(cut_off=cut_off), is_wrapped=False)
        if self._answer is not None and self.in_answer is not None:
            self._add(self._answer.finish(cut_off=cut_off))
        self._sink.content(self._held)
        return self._sink.take()

    def _read(self) -> Reading[None]:
        if not self.in_answer:
            mark = yield from self._read_beginning()
            is_divided = mark in (*self._closes, *self._heads)
            if self.has_reasoning:
                is_divided = yield from self._read_reasoning()
            self.in_answer = True
            if is_divided:
                yield from self._read_more_closes()
        while True:
            self._show(self._take(len(self._pending)))
            yield

    def _read_beginning(self) -> Reading[str]:
        """Read up to the first reasoning or answer; returns the mark there."""
        self._is_unsure = True
        try:
            behind = () if self._inside else (*self._closes, *self._heads)
            mark = yield from self._mark(*self._starts, *behind)
        except EndOfTextError:
            (self._give if self._inside else self._show)(self._pending)
            raise
        self._is_unsure = False
        self._take(self._at if mark else 0)
        self.has_reasoning = self._inside or mark in self._starts
        return mark

    def _read_reasoning(self) -> Reading[bool]:
        """Read the reasoning; returns whether a closing mark has ended it, not a call."""
        mark = yield from self._read_text()
        if mark in self._closes:
            self._take(len(mark))
            return True
        num_characters = self._num_fed - len(self._pending) + len(mark)
        assert self._answer is not None and self._new_answer is not None
        self.in_answer = None
        while True:
            found = first_mark(self._pending, self._closes)
            size = num_settled(self._pending, self._closes) if found is None else found[0]
            events = self._answer.feed(self._take(size))
            started = next((place for place, one in enumerate(events) if isinstance(one, CallStarted)), len(events))
            self._give(_content(events[:started]))
            if started < len(events):
                self._is_late, self._unwrap, self.num_reasoning_characters = True, None, num_characters
                self._add(events[started:])
                return False
            if found is None and not self._has_ended:
                yield from self._more()
                continue
            if found is None:
                self._give(_content(self._answer.feed(self._take(len(self._pending)))))
            self._give(_content(self._answer.finish(cut_off=False)))
            self._answer = self._new_answer()
            self._take(0 if found is None else len(found[1]))
            return True

    def _read_more_closes(self) -> Reading[None]:
        try:
            while (yield from self._mark(*self._closes, *self._heads)):
                pass
        except EndOfTextError:
            self._show(self._pending[self._at :])
            raise
        self._take(self._at)

    def _give(self, text: str) -> None:
        """Pass on reasoning without the white space at both of its ends."""
        whole = self._space + text if self._has_text else text.lstrip()
        solid = whole.rstrip()
        self._space = whole[len(solid) :]
        self._has_text |= bool(solid)
        self._sink.reasoning(solid)

    def _show(self, text: str, *, is_wrapped: bool = True) -> None:
        """Pass on text of the answer."""
        if self._unwrap is not None and is_wrapped:
            text = self._unwrap.feed(text)
        self._add([ContentText(text)] if self._answer is None else self._answer.feed(text))

    def _add(self, events: Sequence[ChatEvent]) -> None:
        """Add events of the answer, without a closing mark that comes late."""
        for event in events:
            text, self._held = self._held, ""
            if not isinstance(event, ContentText):
                self._sink.content(text)
                self._sink.add(event)
                continue
            text += event.text
            found = first_mark(text, self._closes) if self._is_late else None
            if found is not None:
                self._is_late, text = False, text[: found[0]] + text[found[0] + len(found[1]) :]
            size = num_settled(text, self._closes) if self._is_late else len(text)
            self._sink.content(text[:size])
            self._held = text[size:]


def _content(events: Sequence[ChatEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


# Tokens searched for a mark at once, and the most tokens of a mark.
_WINDOW, _LONGEST_MARK = 512, 64


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

        ``num_characters``: a call has ended the reasoning, which has that many, the call's opening mark included.
        """
        ids = list(token_ids)
        if num_characters is not None:
            return bisect.bisect_left(range(len(ids)), num_characters, key=lambda end: len(self.decode(ids[:end])))
        if self.close_id is not None:
            return ids.index(self.close_id) + 1 if self.close_id in ids else len(ids)
        for start in range(0, len(ids), _WINDOW):
            window = ids[max(0, start - _LONGEST_MARK) : start + _WINDOW]
            if self._has_close(window):
                size = bisect.bisect_left(range(len(window)), True, key=lambda end: self._has_close(window[:end]))
                return max(0, start - _LONGEST_MARK) + size
        return len(ids)

    def _has_close(self, token_ids: list[int]) -> bool:
        text = self.decode(token_ids)
        return any(mark in text for mark in self.closes)
