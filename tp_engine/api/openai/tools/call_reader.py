"""One tool call's JSON object, read piece by piece: ``{"name": "f", "arguments": {...}}``.

::

    BETWEEN --"--> KEY --"--> COLON --:--> VALUE --+-- name ----------------> STRING --"--+
       ^ |                                         +-- arguments, text -----> STRING --"--+
       | }--> done                                 +-- arguments, else -----> RAW --------+
       |                                           +-- any other key -------> RAW --------+
       +----------------------------------------------------------------------------------+

Once the name is known, arguments are passed on as they come, in the model's own spelling.  They are not checked to be
JSON; the reader follows strings and brackets only, to find their end.  It escapes raw control characters inside of
strings, which models write and JSON forbids.  Arguments in a string are the text of an object, or else stay a string.
"""

import enum
import json
import re

from tp_engine.api.openai.tools.argument_types import parsed_json
from tp_engine.api.openai.tools.events import EventSink

_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME_KEY = "tool_name"  # Command models call the name so
_STRICT_KEYS = ("name", "type", *_ARGUMENT_KEYS)
_MAX_STRICT_CHARS = 1024
_SPACE = " \t\r\n"
# Runs of characters that do not change the state.
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]<]+')


class _JsonState(enum.Enum):
    BETWEEN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    RAW = enum.auto()


class CallReader:
    """Reads the text behind the opening brace.  ``done``: it has read the closing one.  ``broken``: this is no call.

    ``strict_names`` is for text that may only look like a call: its first keys must be those of a call, and the name
    must come first and be one of these.  ``checks_arguments``: the call is known with the first key of its arguments,
    up to which this may turn out to be no call; otherwise it is known with its name.  ``started`` tells whether the
    sink knows of the call.
    """

    def __init__(
        self, sink: EventSink, strict_names: frozenset[str] | None = None, *, checks_arguments: bool = False
    ) -> None:
        self.done = False
        self.broken = False
        self._sink = sink
        self._strict_names = strict_names
        self._checks_arguments = checks_arguments
        self._state = _JsonState.BETWEEN
        self._num_chars = 0
        self._string = ""  # a key, a name, or arguments written as a string: raw, without quotes
        self._escaped = False
        self._in_string = False
        self._depth = 0
        self._is_opened = False  # it has read the brace of the arguments, and nothing behind it
        self._key = ""
        self._name: str | None = None
        self._index: int | None = None
        self._waiting = ""  # arguments that came before the name
        self._saw_arguments = False  # it has read their key and the first character of their value
        self._has_arguments = False  # some of them were passed on, or wait

    @property
    def started(self) -> bool:
        """Whether the sink has got the call's name."""
        return self._index is not None

    @property
    def _is_strict(self) -> bool:
        return self._strict_names is not None and not self.started

    @property
    def _is_unsure(self) -> bool:
        return self._checks_arguments and not self.started

    @property
    def has_whole_arguments(self) -> bool:
        """Whether it has read the last character of the arguments' object."""
        return self._saw_arguments and self._state is _JsonState.BETWEEN

    def push(self, text: str, position: int) -> int:
        """Read at ``position`` of ``text``: one character, or a run of plain ones inside of arguments.

        Returns the number of characters; 0 if the character broke the object.
        """
        in_run = self._state is _JsonState.RAW and not self._escaped and (self._in_string or self._depth > 0)
        if in_run and not self._is_unsure:
            run = (_IN_STRING if self._in_string else _BETWEEN_STRINGS).match(text, position)
            if run is not None:
                self._give_raw(run.group())
                return len(run.group())
        self._push(text[position])
        return 0 if self.broken else 1

    def _push(self, char: str) -> None:
        self._num_chars += 1
        if self._is_strict and self._num_chars > _MAX_STRICT_CHARS:
            self.broken = True
            return
        match self._state:
            case _JsonState.BETWEEN:
                self._between(char)
            case _JsonState.KEY | _JsonState.STRING:
                self._in_text(char)
            case _JsonState.COLON:
                if char == ":":
                    self._state = _JsonState.VALUE
                elif char not in _SPACE:
                    self.broken = True
            case _JsonState.VALUE:
                self._begin_value(char)
            case _JsonState.RAW:
                self._raw(char)

    def _between(self, char: str) -> None:
        if char == '"':
            self._state, self._string = _JsonState.KEY, ""
        elif char == "}":
            self._end()
        elif char != "," and char not in _SPACE:
            self.broken = True

    def _end(self) -> None:
        if self._name is None or (self._strict_names is not None and not self._saw_arguments):
            self.broken = True
            return
        self._announce()
        if not self._has_arguments:
            self._give("{}")
        self.done = True

    def _in_text(self, char: str) -> None:
        """A character of a key, or of a string value that is read as a whole."""
        if char != '"' or self._escaped:
            self._escaped = char == "\\" and not self._escaped
            self._string += char
            return
        try:
            text = valid_unicode(str(json.loads(f'"{self._string}"', strict=False)))
        except ValueError:
            self.broken = True
            return
        if self._state is _JsonState.KEY:
            self._key, self._state = "name" if text == _NAME_KEY else text, _JsonState.COLON
            is_of_call = text in _STRICT_KEYS and (text not in _ARGUMENT_KEYS or self._name is not None)
            self.broken = self._is_strict and not is_of_call
            return
        self._state = _JsonState.BETWEEN
        if self._key == "name":
            self._take_name(text)
        elif text.strip():
            written, value = parsed_json(text) or ("", None)
            self._give(written if isinstance(value, dict) else json.dumps(text, ensure_ascii=False))

    def _take_name(self, name: str) -> None:
        if not name or (self._strict_names is not None and name not in self._strict_names):
            self.broken = True
        elif self._name is None:
            self._name = name
            if not self._checks_arguments:
                self._announce()

    def _begin_value(self, char: str) -> None:
        if char in _SPACE:
            return
        is_arguments = self._key in _ARGUMENT_KEYS and not self._saw_arguments
        self._saw_arguments |= is_arguments
        if char == '"' and (self._key == "name" or is_arguments):
            self._state, self._string = _JsonState.STRING, ""
            return
        if char in ",}" or self._key == "name" or (is_arguments and self._is_unsure and char not in "{n"):
            self.broken = True
            return
        self._state, self._depth, self._in_string = _JsonState.RAW, 0, False
        # null stands for no arguments
        self._key = "" if not is_arguments or char == "n" else self._key
        self._is_opened = is_arguments and char == "{"
        self._raw(char)

    def _raw(self, char: str) -> None:
        """A character of a value whose end is found by its brackets."""
        if self._is_opened and self._depth and char not in _SPACE:
            self._is_opened = False
            if self._is_unsure and char not in '"}':
                self.broken = True
                return
        if self._in_string:
            self._give_raw(json.dumps(char)[1:-1] if char < " " else char)
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._in_string = False
        elif char in "}]" or (char == "," and self._depth == 0):
            self._close(char)
        elif char == "<":  # never in JSON outside of a string: closing markup after a missing bracket
            self.broken = True
        else:
            self._depth += char in "{["
            self._in_string = char == '"'
            self._give_raw(char)
        if self._depth == 0 and not self._in_string and char in '}]"':
            self._state = _JsonState.BETWEEN if self._state is _JsonState.RAW else self._state

    def _close(self, char: str) -> None:
        if self._depth == 0:  # a number or word ends with the object, or with a comma
            self._state = _JsonState.BETWEEN
            self._between(char)
            return
        self._depth -= 1
        self._give_raw(char)

    def _give_raw(self, text: str) -> None:
        if self._key in _ARGUMENT_KEYS and (self._depth or text not in _SPACE):
            self._give(text)

    def _give(self, text: str) -> None:
        self._has_arguments = True
        if self._name is None or (self._is_unsure and self._is_opened):
            self._waiting += text
            return
        self._announce()
        assert self._index is not None
        self._sink.arguments(self._index, text)

    def _announce(self) -> None:
        if self._index is None:
            assert self._name is not None
            self._index = self._sink.start_call(self._name)
            self._sink.arguments(self._index, self._waiting)
            self._waiting = ""


def valid_unicode(text: str) -> str:
    """``text`` with U+FFFD for half a surrogate pair, which no encoding can write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
