"""Tool calls that are JSON objects after a mark: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``.

Once the name is known, arguments are passed on as they come, in the model's own spelling.  They are not checked to be
JSON; only strings and brackets are followed, to find their end.  Raw control characters in strings, which models write
and JSON forbids, become escapes.  Arguments in a string are the text of an object, or else stay a string.

``CallBlock`` names the marks of one format.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tp_engine.api.openai.tools.argument_types import parsed_json
from tp_engine.api.openai.tools.events import NewCallId, openai_call_id
from tp_engine.api.openai.tools.text_parser import (
    NO_SPACE,
    EndOfTextError,
    NoCallError,
    Reading,
    TextParser,
    valid_unicode,
)
from tp_engine.api.openai.tools.tool_format import CallIds, ToolFormat

# Between the objects of one block; some models write a list.
SEPARATORS = " \t\r\n,[]"
_BEFORE_OBJECTS = " \t\r\n[{"
_MAX_HEAD = 512
PYTHON_TAG = "<|python_tag|>"
_BETWEEN_CALLS = re.compile(r"[ \t\r\n;,]*")

_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME_KEYS = ("name", "tool_name")  # Command models write the second
_STRICT_KEYS = ("name", "type", *_ARGUMENT_KEYS)
_MAX_STRICT_CHARS = 1024
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN_PAIRS = re.compile(r"[ \t\r\n,]*")
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]<,]*')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The marks of one format.

    One of ``opens`` begins a block, which ``close`` ends; ``is_closed`` False: so does any other text.  Marks
    ``between`` the calls of a block are skipped.  ``head`` matches what precedes the arguments' object, where that is
    not a whole call, and its group 1 is the call's name; such a call begins after an opening mark, or one ``between``.
    The mark ``arguments``, where the model writes it, ends the head; ``in_head`` are its other marks.  Texts outside
    blocks never show ``drops``.
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
        """The format of ``models`` that write calls so; ``fields`` are others of ``ToolFormat``."""
        marks = (*self.opens, self.close, *self.between, self.arguments, *self.in_head, *self.drops)
        return ToolFormat(
            models=models,
            marks=tuple(filter(None, marks)),
            opens=self.opens,
            new_parser=lambda tools: JsonCallsParser(self, call_ids(tools)),
            call_ids=call_ids,
            **fields,
        )


class ObjectsParser(TextParser):
    """Base of the parsers of calls that are JSON objects."""

    _names: frozenset[str] | None = None
    _checks_arguments = False
    _limit: int | None = None  # of characters that may be read before a call is certain
    _name = ""
    _waiting: list[str]  # arguments that came before the name, in pieces
    _has_arguments = False

    def _more(self) -> Reading[None]:
        self._check_limit()
        return super()._more()

    def _check_limit(self) -> None:
        if self._limit is not None and self._at > self._limit:
            raise NoCallError

    def _read_call(self, names: frozenset[str] | None = None, *, checks_arguments: bool = False) -> Reading[None]:
        """Read the object of a call, from after its brace to its end.  Raises ``NoCallError`` if it is not a call.

        ``names`` are for text that may only look like a call: its first keys must be those of a call, and the name must
        come first and be one of these.  ``checks_arguments``: the call is known with the first key of its arguments, up
        to which this may turn out to be no call; otherwise it is known with its name.  ``_is_unsure`` ends then.
        """
        self._names, self._checks_arguments, self._is_unsure = names, checks_arguments, True
        self._limit = None if names is None else self._at + _MAX_STRICT_CHARS
        self._name, self._waiting, self._has_arguments = "", [], False
        has_key = False
        while (yield from self._next(_BETWEEN_PAIRS)) != "}":
            key = yield from self._read_string()
            is_arguments = key in _ARGUMENT_KEYS
            if self._is_unsure and names is not None and (key not in _STRICT_KEYS or (is_arguments and not self._name)):
                raise NoCallError
            if (yield from self._next(_SPACE)) != ":":
                raise NoCallError
            self._at += 1
            yield from self._next(_SPACE)
            if key in _NAME_KEYS:
                yield from self._read_name()
            elif is_arguments and not has_key:
                has_key = True
                yield from self._read_arguments()
            else:
                yield from self._read_value(lambda text: None)
        if not self._name or (names is not None and not has_key):
            raise NoCallError
        self._start_call()
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._at += 1

    def _read_name(self) -> Reading[None]:
        name = yield from self._read_string()
        if not name or (self._names is not None and name not in self._names):
            raise NoCallError
        self._name = self._name or name
        if not self._checks_arguments:
            self._start_call()

    def _start_call(self) -> None:
        if self._is_unsure:
            self._check_limit()
            self._limit, self._is_unsure = None, False
            self._sink.start_call(self._name)
            self._sink.arguments("".join(self._waiting))

    def _give_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._name:
            self._start_call()
            self._sink.arguments(text)
        else:
            self._waiting.append(text)

    def _read_arguments(self) -> Reading[None]:
        """Read the value of arguments and pass it on; null stands for none."""
        char, start = self._pending[self._at], self._at
        if char == '"':
            text = yield from self._read_string()
            if text.strip():
                written, value = parsed_json(text) or ("", None)
                self._give_arguments(written if isinstance(value, dict) else json.dumps(text, ensure_ascii=False))
            return
        if self._checks_arguments and self._is_unsure:
            if char == "{":
                self._at += 1
                if (yield from self._next(_SPACE)) not in '"}':
                    raise NoCallError
                self._check_limit()
                self._at = start
            elif char != "n":
                raise NoCallError
        yield from self._read_value(self._give_arguments if char != "n" else lambda text: None)

    def _read_string(self) -> Reading[str]:
        """Read a string, and return its value."""
        parts: list[str] = []
        if self._pending[self._at] != '"':
            raise NoCallError
        self._at += 1
        yield from self._pass_string(parts.append)
        try:
            return valid_unicode(str(json.loads(f'"{"".join(parts)}')))
        except ValueError:
            self._at -= 1
            raise NoCallError from None

    def _pass_string(self, give: Callable[[str], None]) -> Reading[None]:
        """Pass on the rest of a string, with its closing quote."""
        while True:
            found = _IN_STRING.match(self._pending, self._at)
            assert found is not None
            self._at = found.end()
            give(_CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], found.group()))
            if self._pending.startswith('"', self._at):
                self._at += 1
                give('"')
                return
            if self._at < len(self._pending):  # half an escape, with which the text may be cut off
                self._at += 1
                give("\\")
                give((yield from self._next(NO_SPACE)))
                self._at += 1
            else:
                yield from self._more()

    def _read_value(self, give: Callable[[str], None]) -> Reading[None]:
        """Read a value up to its end, found by its brackets, and pass it on."""
        depth, is_empty = 0, True
        while True:
            found = _BETWEEN_STRINGS.match(self._pending, self._at)
            assert found is not None
            text, self._at = found.group(), found.end()
            if text := text if depth else "".join(text.split()):
                give(text)
                is_empty = False
            char = self._pending[self._at : self._at + 1]
            if not char:
                yield from self._more()
                continue
            if char == "<" or (is_empty and char in ",}]"):  # closing markup after a missing bracket, or no value
                raise NoCallError
            if depth == 0 and char in ",}]":  # a number or word ends with the object, or with a comma
                return
            self._at, is_empty = self._at + 1, False
            depth += (char in "{[") - (char in "]}")
            give(char)
            if char == '"':
                yield from self._pass_string(give)
            if depth == 0:
                return


class _BlockPlace(Enum):
    """Where the reader of a block stands."""

    HEAD = "in front of a call's head, or of its object"
    OBJECT = "in front of a call's object"
    INSIDE = "in a call's object"


class JsonCallsParser(ObjectsParser):
    """The parser of a ``CallBlock``.  A block without a call is content, with its marks, so that no text is lost."""

    def __init__(self, block: CallBlock, new_call_id: NewCallId = openai_call_id) -> None:
        super().__init__(block.opens, drops=block.drops, new_call_id=new_call_id)
        self._block, self._begin = block, _BlockPlace.OBJECT if block.head is None else _BlockPlace.HEAD

    def _read_block(self, mark: str) -> Reading[None]:
        block = self._block
        self._at, self._is_unsure = len(mark), True
        is_new, place = True, self._begin  # no call of the block has been read
        try:
            while True:
                start = self._at
                mark = yield from self._mark(*self._opens, block.close, *block.between, space=NO_SPACE)
                if mark in (block.close, *self._opens):  # the closing mark may be missing before the next block
                    self._take(self._at - (len(mark) if mark in self._opens else 0))
                    break
                char = self._pending[self._at : self._at + 1]
                if mark:
                    place = self._begin
                elif char in SEPARATORS and (place is _BlockPlace.OBJECT or char in _BEFORE_OBJECTS):
                    place = place if char.isspace() else _BlockPlace.OBJECT
                    self._at += 1
                else:
                    if place is _BlockPlace.HEAD and char not in _BEFORE_OBJECTS:
                        yield from self._read_named_call()
                    elif char == "{":
                        self._at, place = self._at + 1, _BlockPlace.INSIDE
                        yield from self._read_call()
                    else:
                        raise NoCallError
                    self._take(self._at)
                    self._is_unsure, is_new, place = True, False, _BlockPlace.OBJECT
        except NoCallError:
            if not self._is_unsure or (block.is_closed and not is_new):
                yield from self._skip(block.close, *(() if block.is_closed else self._opens))
            else:  # a block without a call, or other text that ends it
                text = self._take(self._at)
                self._give(text if is_new else text[len(text.rstrip()) :])
        except EndOfTextError:
            is_half = place is _BlockPlace.HEAD and is_new and bool(self._pending[start:].strip())
            if self._is_unsure and (place is _BlockPlace.INSIDE or is_half):
                self._give(self._pending)
            raise
        self._is_unsure = False

    def _read_named_call(self) -> Reading[None]:
        """Read a call whose name precedes its arguments."""
        block, start = self._block, self._at
        found = yield from self._up_to(tuple(filter(None, (block.arguments, "{"))), _MAX_HEAD)
        assert block.head is not None
        named = None if found is None else block.head.fullmatch(found[0])
        if found is not None and found[1] == "{":
            self._at -= 1
        if named is None or (yield from self._next()) != "{":
            self._at = start
            raise NoCallError
        self._is_unsure = False
        self._sink.start_call(named[1])
        yield from self._read_value(self._sink.arguments)


class Llama3JsonToolParser(ObjectsParser):
    """The parser of Llama 3: ``{"name": "f", "parameters": {...}}``, several separated by ``;``.

    ``PYTHON_TAG`` may precede a call and is never shown.  Without it an object is a call only if it begins with the
    name of one of the request's tools, ``names``; other braces are content.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__((PYTHON_TAG, "{"))
        self._tool_names = names
        self._is_tagged = False  # a call must follow

    def _give(self, text: str) -> None:
        super()._give(text)
        self._is_tagged &= not text.strip()

    def _read_block(self, mark: str) -> Reading[None]:
        if mark == PYTHON_TAG:
            self._take(len(mark))
            self._is_tagged = True
            return
        names, self._is_tagged, self._at = None if self._is_tagged else self._tool_names, False, 1
        try:
            yield from self._read_call(names, checks_arguments=True)
        except NoCallError:
            self._limit = None
            if self._is_unsure:  # content; a call may begin after its first brace
                self._is_unsure = False
                self._give(self._take(1))
                return
        except EndOfTextError:
            if self._is_unsure:
                self._give(self._pending)
            raise
        self._take(self._at)
        self._is_unsure = True
        try:  # separators are dropped if another call follows
            if mark := (yield from self._mark(*self._opens, space=_BETWEEN_CALLS)):
                self._take(self._at - len(mark))
        except EndOfTextError:
            if _BETWEEN_CALLS.fullmatch(self._pending) is None:
                self._give(self._pending)
            raise
        self._is_unsure, self._at = False, 0
