"""What a tape is made of: stretches of calls of C, and calls of Python between them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, TypeAlias

Naming: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""``with naming("rms_norm"):`` surrounds a call."""


@cache
def entry_type(max_words: int) -> type[ctypes.Structure]:
    """``TapeEntry`` of ``tape.h``: a call of up to ``max_words`` arguments."""

    class TapeEntry(ctypes.Structure):
        _fields_ = (("play", ctypes.c_void_p), ("words", ctypes.c_int64 * max_words))

    return TapeEntry


def word_of(argument: Any) -> int:
    """The eight bytes of an argument: an integer, a float32, an address or a pointer."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        bits: int = struct.unpack("<i", struct.pack("<f", argument))[0]
        return bits
    if isinstance(argument, int):
        return argument
    return ctypes.addressof(argument.contents)


class Part(Protocol):
    """Calls that follow one another on a tape."""

    def run(self) -> object:
        """Make them again."""

    def run_named(self, naming: Naming) -> None:
        """The same, each under its name."""


class PythonCall:
    """A collective, with its deadlines."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.run = function

    def run_named(self, naming: Naming) -> None:
        with naming("collective"):
            self.run()


class Entries:
    """Calls of C, and how far they have come: ``run_tape`` goes on from there."""

    def __init__(self, library: ctypes.CDLL, names: Sequence[str], entries: Sequence[ctypes.Structure]) -> None:
        self._run_tape = library.run_tape
        self._names = names
        self._entries = (type(entries[0]) * len(entries))(*entries)
        self._entry_bytes = ctypes.sizeof(entries[0])
        self._position = ctypes.c_int64()
        self._first, self._place = ctypes.addressof(self._entries), ctypes.addressof(self._position)

    def run(self) -> None:
        self._run(self._first, len(self._names))

    def run_named(self, naming: Naming) -> None:
        for i, name in enumerate(self._names):
            with naming(name):
                self._run(self._first + i * self._entry_bytes, 1)

    def _run(self, first: int, count: int) -> None:
        if self._run_tape(first, count, self._place):
            self._position.value = 0
            raise MemoryError("a recorded kernel has no memory for its work")
