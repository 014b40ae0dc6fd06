"""Tool calls that look like those of a program: ``[f(city='Paris'), g()]``, or ``call:f{city:<|"|>Paris<|"|>}``.

``LiteralMarks`` names the marks of one format, ``literals.py`` reads the arguments.  Each is passed on when it has
ended, a string as it comes.  An opening mark shows that this is a call; without one, the first argument must be a
literal, or no call was meant.  In a call, what is not a literal is a string.  Models forget to escape quotes: one ends
a string if what follows may follow a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.argument_types import NO_TYPES
from tp_engine.api.openai.tools.literals import CLOSING, OPENING, PYTHON, Language, LiteralReader
from tp_engine.api.openai.tools.text_parser import (
    NO_SPACE,
    WHITE_SPACE,
    EndOfTextError,
    NoCallError,
    Reading,
    TextParser,
    partial_suffix,
)
from tp_engine.api.openai.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_LAYOUT = " \t\r\n,;[]"
_BETWEEN = re.compile(f"[{re.escape(_LAYOUT)}]*")
_HALF_HEAD = re.compile(r"[\w.\-:]*\s*")
_MAX_HEAD = 256
# What may follow the string of an argument with a key, operators included; and what may become that.
_BEHIND_STRING = re.compile(r"\s*(?:[\]}+%*]|,\s*(?:[\w.\-]+\s*=(?!=)|\))|\)(?:\s*[\],;]|[ \t\r]*\n))")
_HALF_BEHIND = re.compile(r"\s*(?:,\s*[\w.\-]*\s*=?|\)\s*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralMarks:
    """The marks of one format.

    One of ``opens`` begins a block, which ``close`` ends.  ``bare``: an answer may also begin with a list of calls of
    the request's tools, without marks.  ``head`` matches a name, its group 1, and the opening bracket after it.
    ``echoes``: models write a block again, without its opening mark.  Texts never show ``drops``.
    """

    opens: tuple[str, ...]
    close: str
    bare: bool = False
    head: re.Pattern[str] = re.compile(r"([^\W\d][\w.\-]*)\s*\(")
    language: Language = PYTHON
    echoes: bool = False
    drops: tuple[str, ...] = ()

    def format(self, models: str, **fields: Any) -> ToolFormat:
        """The format of ``models`` that write calls so; ``fields`` are others of ``ToolFormat``."""
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
        super().__init__(marks.opens, drops=marks.drops)
        self._marks = marks
        self._tools = tools.argument_types
        self._called: set[str] = set()  # names of all calls
        self._name = ""
        self._keys: set[str] = set()  # of the call's arguments so far
        self._num_used = 0  # of the names in the schema, from the first on
        self._types = NO_TYPES
        self._num_arguments = 0

    def _read(self) -> Reading[None]:
        if self._marks.bare and (yield from self._read_list(self._tools)):
            yield from self._read_calls(is_marked=False)
        yield from super()._read()

    def _read_block(self, mark: str) -> Reading[None]:
        self._at, self._is_unsure = len(mark), True
        yield from self._read_calls(is_marked=True)

    def _read_list(self, names: Collection[str]) -> Reading[bool]:
        """Whether a list of calls of ``names`` begins here; then its bracket has been read."""
        self._is_unsure = True
        try:
            if (yield from self._next()) == "[":
                self._at += 1
                head = yield from self._read_head(WHITE_SPACE)
                if head is not None and head[1] in names:
                    return True
        except EndOfTextError:
            self._give(self._pending)
            raise
        self._is_unsure, self._at = False, 0
        return False

    def _read_head(self, space: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Skip white space; returns the head of a call if one follows."""
        while True:
            found = space.match(self._pending, self._at)
            assert found is not None
            self._at = found.end()
            head = self._marks.head.match(self._pending, self._at)
            rest = self._pending[self._at : self._at + _MAX_HEAD]
            if head is not None or len(rest) == _MAX_HEAD or not _HALF_HEAD.fullmatch(rest):
                return head
            yield from self._more()

    def _read_calls(self, *, is_marked: bool) -> Reading[None]:
        """Read the calls of a block, whose beginning is pending; ``is_marked`` if a mark has opened it."""
        marks, has_call, in_call = self._marks, False, False
        try:
            while not (mark := (yield from self._mark(marks.close, *self._opens, space=_BETWEEN))):
                head = yield from self._read_head(NO_SPACE)
                if head is None or not (is_marked or head[1] in self._tools):
                    raise NoCallError
                self._at, self._name, in_call = head.end(), head[1], True
                if is_marked:
                    self._start_call()
                yield from self._read_call()
                self._take(self._at)
                self._is_unsure, has_call, in_call = True, True, False
        except EndOfTextError:
            if self._is_unsure and (in_call or not has_call):
                self._give(self._pending)
            raise
        except NoCallError:
            if has_call and is_marked:
                yield from self._skip(marks.close, *self._opens)
            elif has_call:
                self._pending = self._pending[self._at :].lstrip(_LAYOUT)
                self._at = 0
            else:
                self._give(self._take(self._at))
            self._is_unsure = False
            return
        self._is_unsure = False
        self._take(self._at if mark == marks.close else self._at - len(mark))
        if mark == marks.close and marks.echoes and has_call and (yield from self._read_list(self._called)):
            yield from self._read_echo()

    def _read_echo(self) -> Reading[None]:
        """Drop a list that is repeated without its opening mark, if the closing mark follows."""
        try:
            found = yield from self._up_to((self._marks.close, *self._opens))
        except EndOfTextError:
            self._give(self._pending)
            raise
        self._is_unsure = False
        self._take(self._at if found is not None and found[1] == self._marks.close else 0)

    def _start_call(self) -> None:
        self._is_unsure = False
        self._sink.start_call(self._name)
        self._called.add(self._name)

    def _read_call(self) -> Reading[None]:
        """Read the arguments of a call and its closing bracket.  Raises ``NoCallError`` if it is not a call."""
        self._types = self._tools.get(self._name, NO_TYPES)
        self._num_arguments, self._num_used, self._keys, mark = 0, 0, set(), ","
        while mark == ",":
            mark = yield from self._read_argument()
        if self._is_unsure:
            self._start_call()
        self._sink.arguments("}" if self._num_arguments else "{}")

    def _read_argument(self) -> Reading[str]:
        """Read an argument, and return the comma or bracket that ends it; a string is passed on as it comes."""
        if not self._is_unsure:
            self._take(self._at)
            with suppress(EndOfTextError):
                while (found := self._marks.language.begun_string(self._pending)) is None:
                    yield from self._more()
                key, start, quote = found
                if quote:
                    self._take(start)
                    self._begin_value(key)
                    return (yield from self._read_string(quote))
        text, mark = yield from self._up_to_end()
        self._give_argument(text)
        return mark

    def _give_argument(self, text: str) -> None:
        """Pass on a whole argument, if there is one.  Raises ``NoCallError`` if it shows that this is not a call."""
        if not text.strip():
            return
        free = self._next_name()
        name = str(self._num_arguments + 1) if free is None else free
        try:
            key, value = LiteralReader(self._marks.language, text).argument(name, self._types)
        except (ValueError, OverflowError):
            if self._is_unsure:
                raise NoCallError from None
            key, value = self._marks.language.divided(text)
            value = json.dumps(value.strip(), ensure_ascii=False)
        if self._is_unsure:
            if key is None and free is None:
                raise NoCallError
            self._start_call()
        self._begin_value(name if key is None else key)
        self._sink.arguments(value)

    def _next_name(self) -> str | None:
        """The first name in the schema that no argument has; None if there is none."""
        names = self._types.names
        while self._num_used < len(names) and names[self._num_used] in self._keys:
            self._num_used += 1
        return names[self._num_used] if self._num_used < len(names) else None

    def _begin_value(self, key: str) -> None:
        self._sink.arguments(f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._keys.add(key)

    def _read_string(self, quote: str) -> Reading[str]:
        """Read a string, further ones concatenated with it, and the end of the argument, which it returns.

        Other text after a string is a part of it.
        """
        language, mark = self._marks.language, ")"
        self._sink.arguments('"')
        try:
            while quote:
                yield from self._pass_string(quote)
                while not (rest := self._pending.lstrip()) or language.quote_of(rest) is None:
                    yield from self._more()
                quote = language.quote_of(rest) or ""
                self._pending = rest[len(quote) :] if quote else self._pending
            text, mark = yield from self._up_to_end()
            self._sink.arguments(json.dumps(text.rstrip(), ensure_ascii=False)[1:-1])
        except EndOfTextError:
            self._give_string(len(self._pending))
        self._sink.arguments('"')
        return mark

    def _pass_string(self, quote: str) -> Reading[None]:
        """Pass on a string up to its closing quote, and drop that."""
        language, is_end = self._marks.language, False
        while not is_end:
            text, sure = self._pending, 0  # up to a quote that is part of the string
            while (end := language.string_end(text, sure, quote)) is not None:
                behind = not language.escapes or self._is_behind_string(end)
                is_end = behind is True
                if behind is not False:
                    break
                sure = end
            if end is None:
                sure = max(sure - len(quote), 0)
                self._give_string(sure + language.settled(text[sure:], quote))
            else:
                self._give_string(end - len(quote))
            if not is_end:
                yield from self._more()
        self._take(len(quote))

    def _is_behind_string(self, place: int) -> bool | None:
        """Whether the pending text at ``place`` may follow a string's quote; None if that is not known yet."""
        rest = self._pending[place : place + _MAX_HEAD]
        solid, close = rest.lstrip(), self._marks.close
        quote = self._marks.language.quote_of(solid)
        behind_call = solid[1:].lstrip() if solid.startswith(")") else ""
        if _BEHIND_STRING.match(rest) is not None or quote or behind_call.startswith(close):
            return True
        is_half = _HALF_BEHIND.fullmatch(rest) or (behind_call and close.startswith(behind_call))
        is_open = len(rest) < _MAX_HEAD and not self._has_ended
        return (None if is_open else True) if is_half or quote is None else False

    def _give_string(self, size: int) -> None:
        """Pass on the first ``size`` characters, of a string."""
        plain = self._marks.language.unescaped(self._take(size))
        self._sink.arguments(json.dumps(plain, ensure_ascii=False)[1:-1])

    def _up_to_end(self) -> Reading[tuple[str, str]]:
        """Read up to the comma or bracket that ends an argument; returns the text and that.

        The end of the text ends it too, if this surely is a call.
        """
        language, depth, quote = self._marks.language, 0, ""
        if not self._is_unsure:
            self._take(self._at)
        place = self._at  # text before it has been read
        try:
            while True:
                text = self._pending
                found = language.pattern(quote).search(text, place)
                held = len(text) - partial_suffix(text, *([quote] if quote else language.quotes))
                if found is None or found.start() >= held or (found.group() == "\\" and found.end() == len(text)):
                    place = max(place, min(held, len(text) if found is None else found.start()))
                    yield from self._more()
                    continue
                mark, place = found.group(), found.end() + (found.group() == "\\")
                if quote:
                    quote = "" if mark == quote else quote
                elif mark in language.quotes:
                    quote = mark
                elif depth == 0 and (mark == "," or mark in CLOSING):
                    text, self._at = text[self._at : place - 1], place
                    return text, mark
                elif mark != ",":
                    depth += 1 if mark in OPENING else -1
        except EndOfTextError:
            if self._is_unsure:
                raise
            text, self._at = self._pending[self._at :], len(self._pending)
            return text, ")"
