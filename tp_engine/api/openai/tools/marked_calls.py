"""Tool calls whose arguments stand between marks: ``<function=f><parameter=key>value</parameter></function>``.

::

    PROSE --open--> BLOCK --call--> NAME --> CALL --key--> KEY --> VALUE --value_end--> CALL
      ^               |                      |
      +---- close ----+------ call_end ------+

``CallMarks`` names the marks of one format; where ``call`` is empty, the block is one call.  Values become JSON by the
schema of the tool (``argument_types.py``).  A string is passed on as it comes, any other value once it has ended.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.argument_types import ArgumentTypes, Types, is_text, json_value, parsed_json
from tp_engine.api.openai.tools.events import ToolFormat
from tp_engine.api.openai.tools.text_parser import TextParser, first_mark, partial_suffix

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_NAME = re.compile(r"(?=.*\w)[^\s<>{}\[\]\"']+")
_WRAPPERS = ("arguments", "input")
_QUOTES = "\"'"
# A key in quotes, and an attribute that tells whether its value is text.
_QUOTED_KEY = re.compile(r"""\s*(["'])([^"']*)\1\s+string=["']?(\w*)""")
_MAX_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """The marks of one format.

    ``name_ends``: the first of these ends the name; one that is a mark of its own is read again.  ``value`` empty: the
    end of the key begins the value.  A value whose ``value_end`` is missing ends at one of ``value_breaks``, at the
    next key (on a line of its own, if the value is), and at marks that close its call, if another call or the end
    follows.
    ``own_lines``: a value that begins with a line end is on lines of its own, and the line ends around it do not belong
    to it.  A key in quotes may have ``string="true"`` behind it: its value is text unless the schema says otherwise.
    ``bare``: a call may come without ``open`` if it names a tool of the request.  Texts never show ``drops``.
    Models also write the arguments of a call as one JSON object, without marks or as the only argument ``arguments`` or
    ``input``, which the tool does not have; each format reads that.
    """

    open: str
    close: str
    call: str = ""
    call_end: str = ""
    name_ends: tuple[str, ...]
    key: str
    key_end: str
    value: str = ""
    value_end: str
    value_breaks: tuple[str, ...] = ()
    own_lines: bool = False
    bare: bool = False
    drops: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        marks = (self.open, self.close, self.call, self.call_end, self.key, self.key_end, self.value, self.value_end)
        return tuple(mark for mark in marks if mark)

    @property
    def value_marks(self) -> tuple[str, ...]:
        """Those that end a value, or may end it."""
        marks = (self.value_end, *self.value_breaks, self.key, self.call_end, self.close)
        return tuple(mark for mark in marks if mark)

    def behind(self, mark: str) -> tuple[str, ...]:
        """Return what must follow ``mark``, which closes a call or a block, if a value in front of it has ended."""
        return tuple(one for one in (self.close if mark == self.call_end else "", self.open, self.call) if one)

    @property
    def opens(self) -> tuple[str, ...]:
        """Those that may begin a call."""
        return (self.open, self.call) if self.bare else (self.open,)

    def format(self, models: str, **fields: Any) -> ToolFormat:
        """Return the format of ``models`` that write their calls between these marks; ``fields`` are others of
        ``ToolFormat``.
        """
        return ToolFormat(
            models=models,
            marks=self.all,
            opens=self.opens,
            new_parser=lambda tools: MarkedCallsParser(self, tools),
            **fields,
        )


class MarkedCallsParser(TextParser):
    """The parser of ``CallMarks``.  A block without a call is content, with its marks, so that no text is lost."""

    def __init__(self, marks: CallMarks, tools: ToolRequest) -> None:
        super().__init__(marks.opens, close=marks.close, drops=marks.drops)
        self._marks = marks
        self._types = {name: ArgumentTypes(parameters) for name, parameters in tools.parameters().items()}
        self._is_bare = False
        self._index = 0
        self._of_tool = ArgumentTypes({})
        self._num_arguments = 0
        self._has_object = False  # the arguments have come as one object
        self._in_wrapper = False  # in an argument that may hold all others
        self._held = self._wrapped = ""  # such an argument, until it is known whether it is the only one; its value
        self._value_types: Types | None = None
        self._at_beginning = False  # of a value
        self._on_own_lines = False
        self._has_begun = False  # of a value, some of which has been passed on
        self._settled = 0  # characters of the pending text that are the value's

    def _end(self) -> None:
        if self._state == self._read_value:
            end = self._last_end()
            self._end_value(self._pending[:end], is_closed=end == len(self._pending))
            self._end_call()
        elif self._state in (self._read_call, self._read_key, self._read_before_value, self._read_object):
            if self._state == self._read_object:
                self._give_object(self._pending)
            self._end_call()
        elif self._state in (self._read_text, self._read_name) or (self._state == self._read_block and self._raw):
            self._give(self._raw + self._pending)

    def _open(self, mark: str) -> None:
        self._raw = mark
        self._is_bare = mark != self._marks.open
        self._state = self._read_name if self._is_bare else self._read_block

    def _read_block(self) -> bool:
        """Before the first call of a block, and behind a call."""
        marks, rest = self._marks, self._pending.lstrip()
        if rest.startswith(marks.close):
            self._state, self._pending, self._raw = self._read_text, rest[len(marks.close) :], ""
        elif rest.startswith(marks.open):
            self._state, self._pending, self._raw = self._read_text, rest, ""
        elif rest and not marks.call and not any(mark.startswith(rest) for mark in (marks.open, marks.close)):
            self._state, self._raw, self._pending = self._read_name, self._raw + self._pending[: -len(rest)], rest
        elif marks.call and rest.startswith(marks.call):
            self._raw += self._pending[: len(self._pending) - len(rest)] + marks.call
            self._state, self._pending = self._read_name, rest[len(marks.call) :]
        elif any(mark.startswith(rest) for mark in (marks.close, marks.open, marks.call)):
            return False
        else:
            self._not_a_call()
        return True

    def _read_name(self) -> bool:
        marks = self._marks
        found = first_mark(self._pending, marks.name_ends)
        length = len(self._pending) - partial_suffix(self._pending, *marks.name_ends) if found is None else found[0]
        if found is None and length <= _MAX_NAME:
            return False
        name = self._pending[:length].strip().strip(_QUOTES)
        if (
            found is None
            or length > _MAX_NAME
            or not _NAME.fullmatch(name)
            or (self._is_bare and name not in self._types)
        ):
            self._not_a_call()
            return True
        is_mark = found[1] in (marks.key, marks.close)
        self._pending = self._pending[length + (0 if is_mark else len(found[1])) :]
        self._index, self._num_arguments, self._has_object = self._sink.start_call(name), 0, False
        self._of_tool = self._types.get(name, ArgumentTypes({}))
        self._state, self._raw = self._read_call, ""
        return True

    def _not_a_call(self) -> None:
        """Show a block without a call; drop other text behind a call in its block."""
        if self._raw:
            self._give(self._raw)
        self._state = self._read_text if self._raw or self._is_bare else self._read_junk
        self._raw = ""

    def _read_call(self) -> bool:
        """Between arguments; text without marks there is dropped."""
        marks, rest = self._marks, self._pending.lstrip()
        ends = tuple(mark for mark in (marks.call_end, marks.close, marks.open, marks.call) if mark)
        if rest.startswith(marks.key) and not self._has_object:
            self._state, self._pending = self._read_key, rest[len(marks.key) :]
        elif rest.startswith(ends):
            self._end_call()
            ended = marks.call_end and rest.startswith(marks.call_end)
            self._state, self._pending = self._read_block, rest[len(marks.call_end) :] if ended else rest
        elif any(mark.startswith(rest) for mark in (marks.key, *ends)):
            return False
        elif rest[0] == "{" and not self._num_arguments and not self._has_object:
            self._state, self._pending, self._settled = self._read_object, rest, 0
        else:
            place = rest.find("<", 1)
            self._pending = rest[place:] if place > 0 else ""
        return True

    def _read_object(self) -> bool:
        """In the arguments of a call that are one JSON object; other text is dropped, as between arguments."""
        ends = tuple(filter(None, (self._marks.key, self._marks.call_end, self._marks.close)))
        found = first_mark(self._pending, ends, self._settled)
        if found is None:
            self._settled = len(self._pending) - partial_suffix(self._pending, *ends)
            return False
        self._give_object(self._pending[: found[0]])
        self._state, self._pending = self._read_call, self._pending[found[0] :]
        return True

    def _give_object(self, text: str) -> None:
        written, value = parsed_json(text.strip()) or ("", None)
        if isinstance(value, dict):
            self._has_object = True
            self._give_arguments(written)

    def _read_key(self) -> bool:
        end = self._marks.key_end
        place = self._pending.find(end)
        length = place if place >= 0 else len(self._pending) - partial_suffix(self._pending, end)
        if length > _MAX_NAME:
            self._state = self._read_call
            return True
        if place < 0:
            return False
        written = _QUOTED_KEY.match(self._pending[:place])
        self._key = self._pending[:place].strip().strip(_QUOTES) if written is None else written[2]
        self._pending = self._pending[place + len(end) :]
        self._value_types = self._of_tool.of(self._key)
        self._in_wrapper = not self._num_arguments and self._key in _WRAPPERS and self._of_tool.lacks(self._key)
        if written is not None and written[3] == "true" and self._value_types is None:
            self._value_types = frozenset({"string"})
        if self._marks.value:
            self._state = self._read_before_value
        else:
            self._begin_value()
        return True

    def _read_before_value(self) -> bool:
        mark, rest = self._marks.value, self._pending.lstrip()
        if rest.startswith(mark):
            self._pending = rest[len(mark) :]
            self._begin_value()
        elif mark.startswith(rest):
            return False
        else:  # a key without a value
            self._state = self._read_call
        return True

    def _begin_value(self) -> None:
        self._state, self._at_beginning, self._on_own_lines = self._read_value, True, False
        self._has_begun, self._settled = False, 0
        self._release()
        before = ", " if self._num_arguments else "{"
        quote = '"' if is_text(self._value_types) else ""
        self._give_argument(f"{before}{json.dumps(self._key, ensure_ascii=False)}: {quote}")
        self._num_arguments += 1

    def _read_value(self) -> bool:
        marks = self._marks
        if self._at_beginning:
            self._at_beginning = False
            if marks.own_lines and self._pending.startswith("\n"):
                self._on_own_lines, self._pending = True, self._pending[1:]
        end = self._find_end()
        if end is not None:
            place, length = end
            self._end_value(self._pending[:place], is_closed=length > 0)
            self._pending = self._pending[place + length :]
            self._state = self._read_call
        elif is_text(self._value_types) and not self._in_wrapper:
            settled = self._settled - self._pending[: self._settled].endswith("\n")
            self._give_arguments(json.dumps(self._pending[:settled], ensure_ascii=False)[1:-1])
            self._pending = self._pending[settled:]
            self._has_begun |= settled > 0
            self._settled -= settled
        return end is not None

    def _find_end(self) -> tuple[int, int] | None:
        """The place where the value ends, and the length of its closing mark; None if that is not known yet.

        Then ``_settled`` characters are surely the value's.
        """
        marks, text = self._marks, self._pending
        while (found := first_mark(text, marks.value_marks, self._settled)) is not None:
            place, mark = found
            if mark == marks.value_end or mark in marks.value_breaks:
                return place, len(mark) if mark == marks.value_end else 0
            if mark == marks.key:  # the next argument begins here if the closing mark of this one is missing
                is_first = place == 0 and not self._has_begun
                is_end: bool | None = not self._on_own_lines or is_first or text[:place].endswith("\n")
            else:
                is_end = self._ends_call(place + len(mark), marks.behind(mark))
            if is_end:
                return place, 0
            self._settled = place if is_end is None else place + len(mark)
            if is_end is None:
                return None
        self._settled = len(text) - partial_suffix(text, *marks.value_marks)
        return None

    def _last_end(self) -> int:
        """Where the value ends at the text's end: in front of marks that only close its call."""
        end = len(self._pending)
        for mark in (self._marks.close, self._marks.call_end):
            text = self._pending[:end].rstrip()
            if mark and text.endswith(mark):
                end = len(text) - len(mark)
        return end

    def _ends_call(self, place: int, marks: tuple[str, ...]) -> bool | None:
        """Whether one of ``marks`` follows at ``place``; None if that is not known yet."""
        rest = self._pending[place:].lstrip()
        return True if rest.startswith(marks) else None if any(mark.startswith(rest) for mark in marks) else False

    def _end_value(self, text: str, *, is_closed: bool) -> None:
        """``text`` is the rest of a string, or another value as a whole; ``is_closed`` if its closing mark is there."""
        text = text.removesuffix("\n") if self._on_own_lines or not is_closed else text
        is_string = is_text(self._value_types)
        value = json.dumps(text, ensure_ascii=False)[1:] if is_string else json_value(text, self._value_types)
        self._give_argument(value)
        self._wrapped, self._in_wrapper = text if self._in_wrapper else "", False

    def _give_argument(self, text: str) -> None:
        if self._in_wrapper:
            self._held += text
        else:
            self._give_arguments(text)

    def _release(self) -> None:
        """Pass on the argument that is held: it is not the only one, or no object."""
        self._give_arguments(self._held)
        self._held = self._wrapped = ""

    def _end_call(self) -> None:
        self._give_object(self._wrapped)
        if self._has_object:
            self._held = self._wrapped = ""
        else:
            self._release()
            self._give_arguments("}" if self._num_arguments else "{}")

    def _give_arguments(self, text: str) -> None:
        self._sink.arguments(self._index, text)
