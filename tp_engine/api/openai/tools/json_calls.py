"""Tool calls that are JSON objects behind a mark: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``.

::

    TEXT --open--> BLOCK --{--> CALL --}--> BLOCK --close--> TEXT
                     |            |
                     |            +-- broken once announced --> JUNK --close--> TEXT
                     +-- a name, where the format has it in front --> HEAD --{--> CALL
                     +-- anything else: not a call, shown as it is --> TEXT

``CallBlock`` names the marks of one format.
"""

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tp_engine.api.openai.tools.call_reader import CallReader
from tp_engine.api.openai.tools.events import CallIds, NewCallId, ToolFormat, openai_call_id
from tp_engine.api.openai.tools.text_parser import TextParser, first_mark, partial_suffix

# Between the objects of one block; some models write a list.
SEPARATORS = " \t\r\n,[]"
_BEFORE_OBJECTS = " \t\r\n[{"
_MAX_HEAD = 512
PYTHON_TAG = "<|python_tag|>"
_BETWEEN_CALLS = " \t\r\n;,"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The marks of one format.

    One of ``opens`` begins a block, which ``close`` ends; ``is_closed`` False: so does any other text.  Marks
    ``between`` the calls of a block are passed over.  ``head`` matches what stands in front of the arguments' object,
    where that is not a whole call, and its group 1 is the call's name; such a call begins behind an opening mark, or
    one ``between``.  The mark ``arguments``, where the model writes it, ends the head; ``in_head`` are its other marks.
    Texts outside of blocks never show ``drops``.
    """

    opens: tuple[str, ...]
    close: str = "</tool_call>"
    is_closed: bool = True
    between: tuple[str, ...] = ()
    head: re.Pattern[str] | None = None
    arguments: str = ""
    in_head: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    def format(self, models: str, *, call_ids: CallIds = lambda tools: openai_call_id, **fields: Any) -> ToolFormat:
        """Return the format of ``models`` that write calls so; ``fields`` are others of ``ToolFormat``."""
        marks = (*self.opens, self.close, *self.between, self.arguments, *self.in_head, *self.drops)
        return ToolFormat(
            models=models,
            marks=tuple(filter(None, marks)),
            opens=self.opens,
            new_parser=lambda tools: JsonCallsParser(self, call_ids(tools)),
            call_ids=call_ids,
            **fields,
        )


class ObjectsParser(TextParser, ABC):
    """Base of the parsers of calls that are JSON objects."""

    _reader: CallReader

    def _begin_call(self, names: frozenset[str] | None = None, *, checks_arguments: bool = False) -> None:
        """An object begins, whose brace has been read; the arguments are those of ``CallReader``."""
        self._reader = CallReader(self._sink, names, checks_arguments=checks_arguments)
        self._state = self._read_call

    @abstractmethod
    def _end_call(self) -> None:
        """Name the next state: the call's last brace has been read."""

    @abstractmethod
    def _leave_call(self) -> None:
        """Name the next state: this is no call, or not one any more.  ``_raw`` is its text unless it has started."""

    def _read_call(self) -> bool:
        reader, position = self._reader, 0
        while position < len(self._pending) and not (reader.broken or reader.done):
            position += self._push(position)
        if not reader.started:
            self._raw += self._pending[:position]
        self._pending = self._pending[position:]
        if reader.broken:
            self._leave_call()
        elif reader.done:
            self._raw = ""
            self._end_call()
        return reader.broken or reader.done

    def _push(self, position: int) -> int:
        """Let the reader read at ``position`` of the pending text; returns the number of characters."""
        return self._reader.push(self._pending, position)


class JsonCallsParser(ObjectsParser):
    """The parser of a ``CallBlock``.  A block without a call is content, with its marks, so that no text is lost."""

    def __init__(self, block: CallBlock, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__(block.opens, close=block.close, drops=block.drops, new_call_id=new_call_id)
        self._block = block
        self._takes_head = False  # a name may come here, in front of its arguments
        self._has_head = False  # the reader's call has a name in front: its text is the arguments

    def _end(self) -> None:
        is_half = self._takes_head and self._raw.startswith(self._opens) and bool(self._pending.strip())
        is_unsure = self._state == self._read_call and not self._reader.started
        if is_half or is_unsure or self._state == self._read_text:
            self._give(self._raw + self._pending)

    def _open(self, mark: str) -> None:
        self._state, self._raw, self._takes_head = self._read_block, mark, self._block.head is not None

    def _read_block(self) -> bool:
        """Between a block's calls."""
        rest, block = self._pending, self._block
        opens = next((mark for mark in self._opens if rest.startswith(mark)), None)
        between = next((mark for mark in block.between if rest.startswith(mark)), None)
        if opens is not None:  # the closing mark may be missing before the next block
            self._pending = rest[len(opens) :]
            self._open(opens)
        elif rest.startswith(self._close):
            self._state, self._pending, self._raw = self._read_text, rest[len(self._close) :], ""
        elif between is not None:
            self._pass(between)
            self._takes_head = block.head is not None
        elif any(mark.startswith(rest) for mark in (self._close, *self._opens, *block.between)):
            return False
        elif self._takes_head and rest[0] not in _BEFORE_OBJECTS:
            self._state = self._read_head
        elif rest[0] in SEPARATORS:
            self._takes_head &= rest[0].isspace()
            self._pass(rest[0])
        elif rest[0] == "{":
            self._pass("{")
            self._takes_head = self._has_head = False
            self._begin_call()
        else:
            self._not_a_call()
        return True

    def _read_head(self) -> bool:
        """From a name up to the brace of its arguments."""
        block, ends = self._block, tuple(filter(None, (self._block.arguments, "{")))
        found = first_mark(self._pending, ends)
        length = len(self._pending) - partial_suffix(self._pending, *ends) if found is None else found[0]
        if found is None and length <= _MAX_HEAD:
            return False
        assert block.head is not None
        named = None if found is None or length > _MAX_HEAD else block.head.fullmatch(self._pending[:length])
        if found is None or named is None:
            self._not_a_call()
            return True
        arguments = self._pending[length + (len(found[1]) if found[1] == block.arguments else 0) :].lstrip()
        if not arguments:
            return False
        if not arguments.startswith("{"):
            self._not_a_call()
            return True
        self._pending, self._takes_head, self._has_head = arguments, False, True
        self._begin_call()
        for char in f'"name": {json.dumps(named[1])}, "arguments": ':
            self._reader.push(char, 0)
        return True

    def _push(self, position: int) -> int:
        size = super()._push(position)
        if self._has_head and self._reader.has_whole_arguments:
            self._reader.push("}", 0)
        return size

    def _end_call(self) -> None:
        self._state = self._read_block

    def _leave_call(self) -> None:
        if self._reader.started:
            self._state, self._raw = self._read_junk, ""
        else:
            self._not_a_call()

    @property
    def _junk_ends(self) -> tuple[str, ...]:
        return (self._close,) if self._block.is_closed else (self._close, *self._opens)

    def _not_a_call(self) -> None:
        """Show a block without a call; drop other text behind a call in its block."""
        if self._raw.startswith(self._opens):
            self._give(self._raw)
            self._state = self._read_text
        elif not self._block.is_closed:
            self._give(self._raw[len(self._raw.rstrip()) :])
            self._state = self._read_text
        else:
            self._state = self._read_junk
        self._raw, self._takes_head = "", False

    def _pass(self, mark: str) -> None:
        self._raw += mark
        self._pending = self._pending[len(mark) :]


class Llama3JsonToolParser(ObjectsParser):
    """The parser of Llama 3: ``{"name": "f", "parameters": {...}}``, several separated by ``;``.

    ``PYTHON_TAG`` may precede a call and is never shown.  Without it an object is a call only if it begins with the
    name of one of the request's tools, ``names``; other braces are content.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__((PYTHON_TAG, "{"))
        self._names = names
        self._is_tagged = False  # a call must follow

    def _end(self) -> None:
        is_over = self._state == self._read_between and not self._pending.strip(_BETWEEN_CALLS)
        if not is_over and not (self._state == self._read_call and self._reader.started):
            self._give(self._raw + self._pending)

    def _give(self, text: str) -> None:
        super()._give(text)
        self._is_tagged &= not text.strip()

    def _open(self, mark: str) -> None:
        if mark == PYTHON_TAG:
            self._is_tagged = True
            return
        self._begin_call(None if self._is_tagged else self._names, checks_arguments=True)
        self._raw, self._is_tagged = "{", False

    def _read_between(self) -> bool:
        """Behind a call: drop separators if another call follows."""
        rest = self._pending.lstrip(_BETWEEN_CALLS)
        if not rest or (PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG):
            return False
        if rest.startswith(self._opens):
            self._pending = rest
        self._state = self._read_text
        return True

    def _end_call(self) -> None:
        self._state = self._read_between

    def _leave_call(self) -> None:
        """An object that is not a call is content; a call may begin behind its first brace."""
        if self._reader.started:
            self._state = self._read_between
        else:
            self._state = self._read_text
            self._give("{")
            self._pending = self._raw[1:] + self._pending
        self._raw = ""
