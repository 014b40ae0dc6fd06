"""A tape: calls of compiled functions, recorded while a step runs, made again by one call of C (``tape.c``).

::

    recording      function(arguments)  call(python, arguments)  function(arguments) ...
    tape           entries of C         a Python call            entries of C

Arguments are recorded as they are: numbers, and addresses of memory whose owners keep it where it is.  What a step must
do in Python, a collective with its deadlines, divides the tape.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_WORDS = 14


class TapeEntry(ctypes.Structure):
    """``TapeEntry`` of ``tape.h``."""

    _fields_ = (("play", ctypes.c_void_p), ("words", ctypes.c_int64 * MAX_WORDS))


class Recordable:
    """A function of the library, whose calls go on the tape that is being recorded.

    It returns 0, or, by the rule of all of them, another number where memory ran out.  ``player`` calls it with
    arguments from words.
    """

    def __init__(self, function: Any, player: Any) -> None:
        self._function = function
        self._player: int = ctypes.cast(player, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> int:
        tape = _recorded.get()
        if tape is not None:
            tape.add(self._player, arguments)
        status: int = self._function(*arguments)
        return status


class Tape:
    """Calls in their order, and what they need kept alive."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run_tape
        self._entries: list[TapeEntry] = []
        self._parts: list[Callable[[], object]] = []
        self._kept: list[tuple[Any, ...]] = []

    def add(self, player: int, arguments: tuple[Any, ...]) -> None:
        """One more call of C; ``player`` is the address of its player."""
        entry = TapeEntry(play=player)
        for i, argument in enumerate(arguments):
            entry.words[i] = _word(argument)
        self._entries.append(entry)
        self._kept.append(arguments)

    def add_python(self, function: Callable[[], object]) -> None:
        """One more call of Python."""
        self._end_part()
        self._parts.append(function)

    def finish(self) -> None:
        """Nothing more is recorded."""
        self._end_part()

    def run(self) -> None:
        """Make all calls again."""
        for part in self._parts:
            part()

    def _end_part(self) -> None:
        if not self._entries:
            return
        entries, count = (TapeEntry * len(self._entries))(*self._entries), len(self._entries)
        run, position = self._run, ctypes.c_int64()
        first, place = ctypes.addressof(entries), ctypes.addressof(position)
        self._kept.append((entries, position))

        def part() -> None:
            if run(first, count, place):
                position.value = 0
                raise MemoryError("a recorded kernel has no memory for its work")

        self._parts.append(part)
        self._entries = []


_recorded: ContextVar[Tape | None] = ContextVar("recorded_tape", default=None)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Put the calls of this block, by this thread, on ``tape``, while they are made."""
    token = _recorded.set(tape)
    try:
        yield
    finally:
        _recorded.reset(token)
        tape.finish()


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which is recorded as one call of Python, whatever it calls itself.

    It must do everything in place, and return the same each time.
    """
    tape = _recorded.get()
    if tape is None:
        return function(*arguments)
    tape.add_python(lambda: function(*arguments))
    token = _recorded.set(None)
    try:
        return function(*arguments)
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Whether calls go on a tape now; not within ``call``."""
    return _recorded.get() is not None


def _word(argument: Any) -> int:
    """The eight bytes of an argument: an integer, a float32, an address or a pointer."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        bits: int = struct.unpack("<i", struct.pack("<f", argument))[0]
        return bits
    if isinstance(argument, int):
        return argument
    return ctypes.addressof(argument.contents)
