"""A tape: calls of compiled functions, recorded while a step runs, made again by one call of C (``tape.c``).

::

    recording      function(arguments)  call(python, arguments)  function(arguments) ...
    tape           entries of C         a Python call            entries of C

Arguments are recorded as they are: numbers, and addresses of memory whose owners keep it where it is.  What a step must
do in Python, a collective with its deadlines, divides the tape.  While a profile is made, each call is made one by one
under its function's name (``naming_calls``), on a tape and elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tp_engine.kernels.native.tape_parts import Entries, Naming, Part, PythonCall, entry_type, word_of


class Recordable:
    """The library's function ``name``, whose calls go on the tape that is being recorded.

    It returns 0, or, by the rule of all of them, another number where memory ran out.  ``player`` calls it with
    arguments from words.
    """

    def __init__(self, name: str, function: Any, player: Any) -> None:
        self._name = name
        self._function = function
        self._player: int = ctypes.cast(player, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> int:
        tape = _recorded.get()
        if tape is not None:
            tape.add(self._name, self._player, arguments)
        naming = _naming.get() if tape is None else None
        status: int
        if naming is None:
            status = self._function(*arguments)
        else:
            with naming(self._name):
                status = self._function(*arguments)
        return status


class Tape:
    """Calls in their order, and what they need kept alive."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._names: list[str] = []
        self._entry_type = entry_type(library.max_words())
        self._entries: list[ctypes.Structure] = []
        self._parts: list[Part] = []
        self._kept: list[tuple[Any, ...]] = []

    def add(self, name: str, player: int, arguments: tuple[Any, ...]) -> None:
        """One more call of C: of function ``name``, by its player at this address."""
        entry = self._entry_type(play=player)
        for i, argument in enumerate(arguments):
            entry.words[i] = word_of(argument)
        self._names.append(name)
        self._entries.append(entry)
        self._kept.append(arguments)

    def add_python(self, function: Callable[[], object]) -> None:
        """One more call of Python."""
        self.finish()
        self._parts.append(PythonCall(function))

    def finish(self) -> None:
        """What follows, if anything, is recorded apart."""
        if self._entries:
            self._parts.append(Entries(self._library, self._names, self._entries))
            self._names, self._entries = [], []

    def run(self) -> None:
        """Make all calls again."""
        naming = _naming.get()
        for part in self._parts:
            if naming is None:
                part.run()
            else:
                part.run_named(naming)


_recorded: ContextVar[Tape | None] = ContextVar("recorded_tape", default=None)
_naming: ContextVar[Naming | None] = ContextVar("naming_of_calls", default=None)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Put the calls of this block, by this thread, on ``tape``, while they are made."""
    token = _recorded.set(tape)
    try:
        yield
    finally:
        _recorded.reset(token)
        tape.finish()


@contextmanager
def naming_calls(naming: Naming) -> Iterator[None]:
    """Make this thread's calls, within this block, one by one under their names."""
    token = _naming.set(naming)
    try:
        yield
    finally:
        _naming.reset(token)


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
