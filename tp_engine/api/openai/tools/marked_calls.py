"""Tool calls whose arguments stand between marks: ``<function=f><parameter=key>value</parameter></function>``.

``CallMarks`` names the marks of one format; where ``call`` is empty, the block is one call.  Values become JSON by the
schema of the tool (``argument_types.py``).  A string is passed on as it comes, any other value once it has ended.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_engine.api.openai.tools.argument_types import NO_TYPES, is_text, json_value, parsed_json
from tp_engine.api.openai.tools.text_parser import (
    NO_SPACE,
    EndOfTextError,
    Reading,
    TextParser,
    first_mark,
    num_settled,
)
from tp_engine.api.openai.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from tp_engine.api.openai.tools.request import ToolRequest

_NAME = re.compile(r"(?=.*\w)[^\s<>{}\[\]\"']+")
_WRAPPERS = ("arguments", "input")
_QUOTES = "\"'"
# A key in quotes, and an attribute that says whether its value is text.
_QUOTED_KEY = re.compile(r"""\s*(["'])([^"']*)\1\s+string=["']?(\w*)""")
_MAX_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """The marks of one format.

    ``name_ends``: the first of these ends the name; one that is a mark of its own is read again.  ``value`` empty: the
    end of the key begins the value.  A value whose ``value_end`` is missing ends at one of ``value_breaks``, at the
    next key (on a line of its own, if the value is), and at marks that close its call, if another call or the end
    follows.  ``own_lines``: a value that begins with a line end is on separate lines, and the line ends around it do
    not belong to it.  ``string="true"`` may follow a key in quotes: its value is text unless the schema says otherwise.
    ``bare``: a call may come without ``open`` if it names a tool of the request.  Texts never show ``drops``.
    ``behind_name`` is a separate mark that may end the name.  The pair ``verbatim`` may surround a value, which then
    ends only after the second of them.  ``others`` are the marks of other versions of the models: the mark that begins
    a block decides between them.  Models also write the arguments of a call as one JSON object, without marks or as the
    only argument ``arguments`` or ``input``, which the tool does not have; each format reads that.
    """

    open: str
    close: str
    call: str = ""
    call_end: str = ""
    name_ends: tuple[str, ...]
    behind_name: str = ""
    key: str
    key_end: str
    value: str = ""
    value_end: str
    value_breaks: tuple[str, ...] = ()
    own_lines: bool = False
    bare: bool = False
    drops: tuple[str, ...] = ()
    verbatim: tuple[str, str] | None = None
    others: tuple[CallMarks, ...] = ()

    @property
    def versions(self) -> tuple[CallMarks, ...]:
        """These marks and the others."""
        return (self, *self.others)

    @property
    def all(self) -> tuple[str, ...]:
        """The marks that may be special tokens."""
        marks = (self.open, self.close, self.call, self.call_end, self.key, self.key_end, self.value, self.value_end)
        return tuple(mark for mark in (*marks, self.behind_name, *(self.verbatim or ())) if mark)

    @property
    def value_marks(self) -> tuple[str, ...]:
        """The marks that end a value, or may end it."""
        marks = (self.value_end, *self.value_breaks, self.key, self.call_end, self.close)
        return tuple(mark for mark in marks if mark)

    def behind(self, mark: str) -> tuple[str, ...]:
        """What must follow ``mark``, which closes a call or a block, if a value before it has ended."""
        return tuple(one for one in (self.close if mark == self.call_end else "", self.open, self.call) if one)

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks that may begin a call."""
        return (self.open, self.call) if self.bare else (self.open,)

    def format(self, models: str, **fields: Any) -> ToolFormat:
        """The format of ``models`` that write their calls between these marks; ``fields`` are others of
        ``ToolFormat``.
        """
        return ToolFormat(
            models=models,
            marks=tuple(mark for one in self.versions for mark in one.all),
            opens=tuple(mark for one in self.versions for mark in one.opens),
            new_parser=lambda tools: MarkedCallsParser(self, tools),
            **fields,
        )


class MarkedCallsParser(TextParser):
    """The parser of ``CallMarks``.  A block without a call is content, with its marks, so that no text is lost."""

    def __init__(self, marks: CallMarks, tools: ToolRequest) -> None:
        super().__init__([mark for one in marks.versions for mark in one.opens], drops=marks.drops)
        self._marks, self._versions = marks, marks.versions
        self._types = tools.argument_types
        self._of_tool = NO_TYPES
        self._num_arguments = 0
        self._has_object = False  # the arguments have come as one object
        self._held = ("", "")  # an argument that may be a wrapper of all, until that is known; and its value

    def _read_block(self, mark: str) -> Reading[None]:
        self._marks = marks = next(one for one in self._versions if mark in one.opens)
        is_bare = mark != marks.open
        others = tuple(filter(None, (marks.close, marks.open, marks.call)))
        self._at, self._is_unsure = len(mark), True
        is_shown = True  # what has been read, if no call follows
        try:
            before = mark if is_bare else (yield from self._mark(*others))
            while before == marks.call:
                is_shown = True
                name = yield from self._read_name()
                if not name or (is_bare and name not in self._types):
                    break
                self._is_unsure = False
                yield from self._read_call(name)
                self._take(self._at)
                self._is_unsure, is_shown = True, False
                before = yield from self._mark(*others)
        except EndOfTextError:
            if self._is_unsure and is_shown:
                self._give(self._pending)
            raise
        self._is_unsure = False
        if before and before in (marks.close, marks.open):
            self._take(self._at - (len(before) if before == marks.open else 0))
        elif is_shown or is_bare:
            self._give(self._take(self._at))
        else:
            yield from self._skip(marks.close)

    def _read_name(self) -> Reading[str]:
        """Read the name of a call; empty, and nothing read, if there is none."""
        start = self._at
        marks = self._marks
        ends = (*marks.name_ends, marks.behind_name) if marks.behind_name else marks.name_ends
        found = yield from self._up_to(ends, _MAX_NAME)
        name = found[0].strip().strip(_QUOTES) if found is not None else ""
        if found is None or not _NAME.fullmatch(name):
            self._at = start
            return ""
        if found[1] in (marks.key, marks.call_end, marks.close):
            self._at -= len(found[1])
        return name

    def _read_call(self, name: str) -> Reading[None]:
        """Read the arguments of a call and its end; text without marks between them is dropped."""
        marks = self._marks
        ends = tuple(filter(None, (marks.call_end, marks.close, marks.open, marks.call)))
        self._sink.start_call(name)
        self._of_tool = self._types.get(name, NO_TYPES)
        self._num_arguments, self._has_object, self._held = 0, False, ("", "")
        try:
            while (found := (yield from self._mark(*ends, marks.key))) not in ends:
                if found and not self._has_object:
                    yield from self._read_argument()
                elif not found and self._pending[self._at] == "{" and not (self._num_arguments or self._has_object):
                    yield from self._read_object()
                elif not found:
                    place = self._pending.find("<", self._at + 1)
                    self._at = place if place > 0 else len(self._pending)
            if found != marks.call_end:
                self._at -= len(found)
        except EndOfTextError:
            self._at = len(self._pending)
        self._give_object(self._held[1])
        if not self._has_object:
            self._release()
            self._sink.arguments("}" if self._num_arguments else "{}")

    def _release(self) -> None:
        """Pass on the argument that is held: it is not the only one, or no object."""
        self._sink.arguments(self._held[0])
        self._held = ("", "")

    def _read_object(self) -> Reading[None]:
        """Read the arguments of a call that are one JSON object; other text is dropped."""
        marks = self._marks
        try:
            found = yield from self._up_to(tuple(filter(None, (marks.key, marks.call_end, marks.close))))
            assert found is not None, "there is no limit"
            text, self._at = found[0], self._at - len(found[1])
        except EndOfTextError:
            text, self._at = self._pending[self._at :], len(self._pending)
        self._give_object(text)

    def _give_object(self, text: str) -> None:
        written, value = parsed_json(text.strip()) or ("", None)
        if isinstance(value, dict):
            self._has_object = True
            self._sink.arguments(written)

    def _read_argument(self) -> Reading[None]:
        """Read a key and its value; a key that is too long, or has no value, is dropped."""
        marks = self._marks
        found = yield from self._up_to((marks.key_end,), _MAX_NAME)
        if found is None or (marks.value and not (yield from self._mark(marks.value))):
            return
        written = _QUOTED_KEY.match(found[0])
        key = found[0].strip().strip(_QUOTES) if written is None else written[2]
        types = self._of_tool.of(key)
        if written is not None and written[3] == "true" and types is None:
            types = frozenset({"string"})
        is_wrapper = not self._num_arguments and key in _WRAPPERS and self._of_tool.lacks(key)
        before = f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._release()
        self._num_arguments += 1
        is_string, held = is_text(types), list[str]()
        give = held.append if is_wrapper else self._sink.arguments
        give(f'{before}"' if is_string else before)
        text = yield from self._read_value(streams=is_string and not is_wrapper)
        give(json.dumps(text, ensure_ascii=False)[1:] if is_string else json_value(text, types))
        if is_wrapper:
            self._held = "".join(held), text

    def _read_value(self, *, streams: bool) -> Reading[str]:
        """Read a value and its closing mark; if it ``streams``, return only what has not been passed on."""
        marks, has_begun, on_own_lines, settled = self._marks, False, False, 0  # characters certain to be the value's
        value_end, ends, sure = marks.value_end, marks.value_marks, tuple[str, ...]()
        try:
            if marks.verbatim is not None and (yield from self._mark(marks.verbatim[0], space=NO_SPACE)):
                value_end = marks.verbatim[1] + marks.value_end
                ends = sure = (value_end, marks.verbatim[1] + marks.call_end)
            if marks.own_lines:
                on_own_lines = (yield from self._next(NO_SPACE)) == "\n"
            self._take(self._at + on_own_lines)
            while True:
                found, is_end = first_mark(self._pending, ends, settled), None
                if found is None:
                    settled = num_settled(self._pending, ends)
                else:
                    place, mark = found
                    has_line = not on_own_lines or not (has_begun or place)
                    is_end = mark in sure or self._ends_value(place, mark, has_line_before=has_line)
                    settled = place if is_end is None else place + len(mark)
                if is_end:
                    is_closed = mark == value_end
                    text, self._at = self._pending[:place], place + (len(mark) if is_closed else 0)
                    break
                if is_end is None:
                    if streams:
                        size = settled - self._pending[:settled].endswith("\n")
                        has_begun |= size > 0
                        self._sink.arguments(json.dumps(self._take(size), ensure_ascii=False)[1:-1])
                        settled -= size
                    yield from self._more()
        except EndOfTextError:
            text, self._at = self._pending[self._at :], len(self._pending)
            is_closed = True
            for mark in (marks.close, marks.call_end, value_end.removesuffix(marks.value_end)):  # only close its call
                if mark and text.rstrip().endswith(mark):
                    text, is_closed = text.rstrip().removesuffix(mark), False
        return text.removesuffix("\n") if on_own_lines or not is_closed else text

    def _ends_value(self, place: int, mark: str, *, has_line_before: bool) -> bool | None:
        """Whether ``mark`` at ``place`` ends the value; None if that is not known yet.

        ``has_line_before``: the next key may stand here, as the value is not on lines of its own, or begins here.
        """
        marks = self._marks
        if mark == marks.value_end or mark in marks.value_breaks:
            return True
        if mark == marks.key:  # the next argument begins here if the closing mark of this one is missing
            return has_line_before or self._pending[:place].endswith("\n")
        rest, behind = self._pending[place + len(mark) :].lstrip(), marks.behind(mark)
        return True if rest.startswith(behind) else None if any(one.startswith(rest) for one in behind) else False
