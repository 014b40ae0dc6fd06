"""Tool calls that look like those of a program: ``[f(city='Paris'), g()]``, or ``call:f{city:<|"|>Paris<|"|>}``.

::

    START --[NAME(--> BLOCK --NAME(--> ARGUMENT --,--> ARGUMENT --)--> BLOCK
      |                 |                |  |  ^
      +--> TEXT --open--+                |  |  +-- , --+
             ^--- close, or other text --+  +-- '--> STRING --'-- , or ) -->
             ^--- ECHO <-- close --------+

``LiteralMarks`` names the marks of one format, ``literals.py`` reads the arguments.  Each is passed on when it has
ended, and a string as it comes.  A mark in front tells that this is a call; without one, the first argument tells,
which must be a literal, or no call was meant.  In a call what is no literal is a string.  Models forget to escape
quotes: one ends a string if what is behind it may be behind a string.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.argument_types import ArgumentTypes
from tp_engine.api.openai.tools.events import ToolFormat
from tp_engine.api.openai.tools.literals import CLOSING, OPENING, PYTHON, Language, LiteralReader, string_end
from tp_engine.api.openai.tools.text_parser import TextParser, first_mark, partial_suffix

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_BETWEEN = " \t\r\n,;[]"
_HALF_HEAD = re.compile(r"[\w.\-:]*\s*")
_MAX_HEAD = 256
# What may stand behind the string of an argument with a key, operators too; and what may become that.
_BEHIND_STRING = re.compile(r"\s*(?:[\]}+%*]|,\s*(?:[\w.\-]+\s*=(?!=)|\))|\)(?:\s*[\],;]|[ \t\r]*\n))")
_HALF_BEHIND = re.compile(r"\s*(?:,\s*[\w.\-]*\s*=?|\)\s*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralMarks:
    """The marks of one format.

    One of ``opens`` begins a block, which ``close`` ends.  ``bare``: an answer may also begin with a list of calls of
    the request's tools, without marks.  ``head`` matches a name, its group 1, and the opening bracket behind it.
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
        self._called: set[str] = set()  # names of all calls
        self._is_last = False  # no text follows what is pending
        self._index: int | None = None  # of the call, None before it is sure
        self._names: list[str] = []  # of arguments that are written without a key
        self._keys: set[str] = set()  # of the call's arguments so far
        self._types = ArgumentTypes({})
        self._num_arguments = 0
        self._place = 0  # in the pending text: what is before it has been looked at
        self._depth = 0
        self._quote = ""

    def _end(self) -> None:
        self._is_last = True
        while self._pending and self._state():
            pass
        if self._index is not None and self._state in (self._read_argument, self._read_string, self._read_behind):
            if self._state == self._read_argument:
                self._give_rest(self._pending)
            else:
                self._give_string(self._pending, len(self._pending))
                self._add('"')
            self._end_call()
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
            self._state = self._read_echo if self._marks.echoes and self._has_call else self._read_text
            self._pending, self._raw = rest[len(self._close) :], ""
        elif opens is not None:
            self._pending = rest[len(opens) :]
            self._open(opens)
        elif head is not None and (self._is_marked or head[1] in self._schemas):
            self._name, self._raw = head[1], self._raw + space + head.group()
            self._pending = rest[head.end() :]
            self._begin_call()
        elif (
            not rest
            or any(mark.startswith(rest) for mark in (self._close, *self._opens))
            or (len(rest) < _MAX_HEAD and _HALF_HEAD.fullmatch(rest))
        ):
            return False
        else:
            self._not_a_call()
        return True

    def _read_echo(self) -> bool:
        """Behind a block, which may come again without its opening mark."""
        rest = self._pending.lstrip()
        inner = rest[1:].lstrip()
        head = self._marks.head.match(inner)
        found = first_mark(rest, (self._close, *self._opens))
        if head is None and rest[:1] in ("", "[") and len(inner) < _MAX_HEAD and _HALF_HEAD.fullmatch(inner):
            return False
        is_list = rest.startswith("[") and head is not None and head[1] in self._called
        if is_list and found is None:
            return False
        if is_list and found is not None and found[1] == self._close:
            self._pending = rest[found[0] + len(self._close) :]
        self._state = self._read_text
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

    def _begin_call(self) -> None:
        schema = self._schemas.get(self._name, {})
        properties = schema.get("properties")
        self._names = list(properties) if isinstance(properties, dict) else []
        self._types = ArgumentTypes(schema)
        self._index, self._num_arguments, self._keys = None, 0, set()
        if self._is_marked:
            self._start_call()
        self._begin_argument()

    def _start_call(self) -> None:
        self._index, self._has_call, self._raw = self._sink.start_call(self._name), True, ""
        self._called.add(self._name)

    def _end_call(self) -> None:
        if self._index is None:
            self._start_call()
        self._add("}" if self._num_arguments else "{}")
        self._index, self._state = None, self._read_block

    def _begin_argument(self) -> None:
        self._state, self._place, self._depth, self._quote = self._read_argument, 0, 0, ""

    def _read_argument(self) -> bool:
        """From the beginning of an argument: to its end, or into a string that is passed on as it comes."""
        if self._place == 0 and self._index is not None:
            found = self._marks.language.begun_string(self._pending)
            if found is None:
                return False
            key, start, quote = found
            if quote:
                self._begin_value(key)
                self._add('"')
                self._state, self._pending, self._quote = self._read_string, self._pending[start:], quote
                return True
        end = self._find_end()
        if end is None:
            return False
        if self._give_rest(self._pending[: end - 1]):
            self._leave_argument(end)
        else:
            self._raw, self._pending = self._raw + self._pending[:end], self._pending[end:]
            self._not_a_call()
        return True

    def _leave_argument(self, end: int) -> None:
        """The argument ends with the character before ``end``: a comma, or the call's bracket."""
        mark, self._pending = self._pending[end - 1], self._pending[end:]
        if mark == ",":
            self._begin_argument()
        else:
            self._end_call()

    def _give_rest(self, text: str) -> bool:
        """Pass on an argument as a whole, if there is one; False if it tells that this is no call."""
        if not text.strip():
            return True
        free = next((one for one in self._names if one not in self._keys), None)
        name = str(self._num_arguments + 1) if free is None else free
        try:
            key, value = LiteralReader(self._marks.language, text).argument(name, self._types)
        except (ValueError, OverflowError):
            if self._index is None:
                return False
            key, value = self._marks.language.divided(text)
            value = json.dumps(value.strip(), ensure_ascii=False)
        if self._index is None and key is None and free is None:
            return False
        if self._index is None:
            self._start_call()
        self._begin_value(name if key is None else key)
        self._add(value)
        return True

    def _begin_value(self, key: str) -> None:
        self._add(f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._keys.add(key)

    def _read_string(self) -> bool:
        language, text = self._marks.language, self._pending
        sure = 0  # up to a quote that is part of the string
        is_end: bool | None = False
        while (end := string_end(text, sure, self._quote, language)) is not None:
            is_end = not language.escapes or self._is_behind_string(end)
            if is_end is not False:
                break
            sure = end
        if end is None:
            sure = max(sure - len(self._quote), 0)
            self._give_string(text, sure + language.settled(text[sure:], self._quote))
            return False
        self._give_string(text, end - len(self._quote))
        if is_end is None:
            return False
        self._pending = text[end:]
        self._state, self._place, self._depth, self._quote = self._read_behind, 0, 0, ""
        return True

    def _is_behind_string(self, place: int) -> bool | None:
        """Whether what is pending at ``place`` may be behind a string's quote; None if that is not known yet."""
        rest = self._pending[place : place + _MAX_HEAD]
        solid = rest.lstrip()
        quote = self._marks.language.quote_of(solid)
        behind_call = solid[1:].lstrip() if solid.startswith(")") else ""
        if _BEHIND_STRING.match(rest) is not None or quote or behind_call.startswith(self._close):
            return True
        is_half = _HALF_BEHIND.fullmatch(rest) or (behind_call and self._close.startswith(behind_call))
        is_open = len(rest) < _MAX_HEAD and not self._is_last
        return (None if is_open else True) if is_half or quote is None else False

    def _give_string(self, text: str, length: int) -> None:
        """Pass on the first characters of ``text``, which is pending."""
        plain = self._marks.language.unescaped(text[:length])
        self._add(json.dumps(plain, ensure_ascii=False)[1:-1])
        self._pending = text[length:]

    def _read_behind(self) -> bool:
        """Behind a string: another one that belongs to it, or the argument's end; other text is part of the string."""
        rest = self._pending.lstrip()
        quote = self._marks.language.quote_of(rest) if rest and self._place == 0 else ""
        if not rest or quote is None:
            return False
        if quote:
            self._state, self._pending, self._quote = self._read_string, rest[len(quote) :], quote
            return True
        end = self._find_end()
        if end is None:
            return False
        if text := self._pending[: end - 1].rstrip():
            self._add(json.dumps(text, ensure_ascii=False)[1:-1])
        self._add('"')
        self._leave_argument(end)
        return True

    def _add(self, text: str) -> None:
        assert self._index is not None
        self._sink.arguments(self._index, text)

    def _find_end(self) -> int | None:
        """The place behind the comma or the bracket that ends the argument; None if it has not come."""
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
            elif self._depth == 0 and (mark == "," or mark in CLOSING):
                return self._place
            elif mark != ",":
                self._depth += 1 if mark in OPENING else -1
