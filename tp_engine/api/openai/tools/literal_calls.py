"""Tool calls that look like those of a program: ``[f(city='Paris'), g()]``, or ``call:f{city:<|"|>Paris<|"|>}``.

::

    START --[NAME(--> BLOCK --NAME(--> CALL --)--> BLOCK
      |                 |                |
      +--> TEXT --open--+                +-- no literals: not a call, shown as it is
             ^--- close, or other text --+

``LiteralMarks`` names the marks of one format, ``literals.py`` reads the arguments, which are passed on as a whole.  A
mark in front tells that this is a call, and then arguments that are no literals are one string; without a mark only the
last bracket tells.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.argument_types import ArgumentTypes
from tp_engine.api.openai.tools.events import ToolFormat
from tp_engine.api.openai.tools.literals import OPENING, PYTHON, Language, LiteralReader
from tp_engine.api.openai.tools.text_parser import TextParser, partial_suffix

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_BETWEEN = " \t\r\n,;[]"
_HALF_HEAD = re.compile(r"[\w.\-:]*\s*")
_MAX_HEAD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralMarks:
    """The marks of one format.

    One of ``opens`` begins a block, which ``close`` ends.  ``bare``: an answer may also begin with a list of calls of
    the request's tools, without marks.  ``head`` matches a name, its group 1, and the opening bracket behind it.
    Texts never show ``drops``.
    """

    opens: tuple[str, ...]
    close: str
    bare: bool = False
    head: re.Pattern[str] = re.compile(r"([^\W\d][\w.\-]*)\s*\(")
    language: Language = PYTHON
    drops: tuple[str, ...] = ()

    def format(self, models: str, **fields: Any) -> ToolFormat:
        """Return the format of ``models`` that write calls so; ``fields`` are others of ``ToolFormat``."""
        quotes = () if self.language.escapes else self.language.quotes
        return ToolFormat(
            models=models,
            marks=(*self.opens, self.close, *self.drops, *quotes),
            opens=self.opens,
            new_parser=lambda tools: LiteralCallsParser(self, tools),
            **fields,
        )


class LiteralCallsParser(TextParser):
    """The parser of ``LiteralMarks``.  A block without a call is content, with its marks, so that no text is lost."""

    def __init__(self, marks: LiteralMarks, tools: ToolRequest) -> None:
        super().__init__(marks.opens, close=marks.close, drops=marks.drops)
        self._marks = marks
        self._schemas = tools.parameters()
        self._state = self._read_start if marks.bare else self._read_text
        self._is_marked = False  # a mark has opened the block
        self._has_call = False
        self._name = ""
        self._index = 0
        self._place = 0  # in the pending text: what is before it has been looked at
        self._depth = 0
        self._quote = ""

    def _end(self) -> None:
        if self._state == self._read_call and self._is_marked:
            self._give_call(self._pending[1:])
        elif self._state != self._read_junk and not (self._state == self._read_block and self._has_call):
            self._give(self._raw + self._pending)

    def _open(self, mark: str) -> None:
        self._state, self._raw, self._is_marked, self._has_call = self._read_block, mark, True, False

    def _read_start(self) -> bool:
        """At the beginning of an answer that may be a list of calls."""
        rest = self._pending.lstrip()
        if not rest:
            return False
        inner = rest[1:].lstrip()
        head = self._marks.head.match(inner)
        if rest[0] == "[" and head is None and len(inner) < _MAX_HEAD and _HALF_HEAD.fullmatch(inner):
            return False
        is_list = rest[0] == "[" and head is not None and head[1] in self._schemas
        self._state = self._read_block if is_list else self._read_text
        if self._state == self._read_text:
            return True
        self._raw, self._pending = self._pending[: -len(inner)], inner
        return True

    def _read_block(self) -> bool:
        """Between a block's calls."""
        rest = self._pending.lstrip(_BETWEEN)
        space = self._pending[: len(self._pending) - len(rest)]
        opens = next((mark for mark in self._opens if rest.startswith(mark)), None)
        head = self._marks.head.match(rest)
        if rest.startswith(self._close):
            self._state, self._pending, self._raw = self._read_text, rest[len(self._close) :], ""
        elif opens is not None:
            self._pending = rest[len(opens) :]
            self._open(opens)
        elif head is not None and (self._is_marked or head[1] in self._schemas):
            self._name, self._raw = head[1], self._raw + space + head.group()[:-1]
            self._pending = rest[head.end() - 1 :]
            self._state, self._place, self._depth, self._quote = self._read_call, 0, 0, ""
            if self._is_marked:
                self._start_call()
        elif (
            not rest
            or any(mark.startswith(rest) for mark in (self._close, *self._opens))
            or (len(rest) < _MAX_HEAD and _HALF_HEAD.fullmatch(rest))
        ):
            return False
        else:
            self._not_a_call()
        return True

    def _not_a_call(self) -> None:
        """Show a block without a call; drop other text behind a call in its block."""
        if self._has_call and self._is_marked:
            self._state = self._read_junk
        elif self._has_call:
            self._state, self._pending = self._read_text, self._pending.lstrip(_BETWEEN)
        else:
            self._state = self._read_text
            self._give(self._raw)
        self._raw = ""

    @property
    def _junk_ends(self) -> tuple[str, ...]:
        return (self._close, *self._opens)

    def _read_call(self) -> bool:
        end = self._find_end()
        if end is None:
            return False
        if self._give_call(self._pending[1 : end - 1]):
            self._state, self._raw, self._pending = self._read_block, "", self._pending[end:]
        else:
            self._raw, self._pending = self._raw + self._pending[:end], self._pending[end:]
            self._not_a_call()
        return True

    def _give_call(self, text: str) -> bool:
        """Pass on the call; False if ``text`` is not its arguments."""
        schema = self._schemas.get(self._name, {})
        properties = schema.get("properties")
        names = list(properties) if isinstance(properties, dict) else []
        try:
            arguments = LiteralReader(self._marks.language, text).arguments(names, ArgumentTypes(schema))
        except (ValueError, OverflowError):
            if not self._is_marked:
                return False
            arguments = json.dumps(text, ensure_ascii=False)
        if not self._is_marked:
            self._start_call()
        self._sink.arguments(self._index, arguments)
        return True

    def _start_call(self) -> None:
        self._index, self._has_call = self._sink.start_call(self._name), True

    def _find_end(self) -> int | None:
        """The place behind the bracket that ends the call; None if it has not come."""
        text, language = self._pending, self._marks.language
        while True:
            found = language.pattern(self._quote).search(text, self._place)
            held = len(text) - partial_suffix(text, *([self._quote] if self._quote else language.quotes))
            if found is None or found.start() >= held or (found.group() == "\\" and found.end() == len(text)):
                self._place = max(self._place, min(held, len(text) if found is None else found.start()))
                return None
            mark = found.group()
            self._place = found.end() + (mark == "\\")
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in language.quotes:
                self._quote = mark
            else:
                self._depth += 1 if mark in OPENING else -1
                if self._depth == 0:
                    return self._place
