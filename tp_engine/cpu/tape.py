"""A tape: calls of compiled functions, recorded while a step runs, made again by one call of C (``tape.c``).

::

    recording      function(arguments)  call(python, arguments)  function(arguments) ...
    tape           entries of C         a Python call            entries of C

Arguments are recorded as C takes them: numbers, and addresses of memory, which must stay in its place.  A call that
must be made in Python, a collective with its deadlines, divides the tape.  For a profile, calls are made one by one
under their functions' names (``naming_calls``), on a tape and elsewhere.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeAlias

import torch

from tp_engine.cpu.extents import check_extents
from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.cpu.prototypes import Prototype

Naming: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""``with naming("rms_norm"):`` surrounds a call."""


_READ_AS = {"int32_t": torch.int32, "int64_t": torch.int64, "float": torch.float32, "uint8_t": torch.uint8}
"""Types of tensors by the C types that say them; ``char`` and ``void`` are of any."""


def address_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the address of a tensor's memory for C, which reads it as ``dtype``; raises ``TypeError`` for a tensor of
    another type or elsewhere, as ambient defaults of torch would make it."""
    if not tensor.is_cpu or (dtype is not None and tensor.dtype is not dtype):
        wanted = "" if dtype is None else f" of {dtype}"
        raise TypeError(f"a compiled kernel reads memory of the CPU{wanted}, not a tensor of {_form(tensor)}")
    return tensor.data_ptr()


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}"


def _address_as(item: str) -> Callable[[Any], Any]:
    """The maker of an argument for a pointer to C's type ``item``."""
    dtype = _READ_AS.get(item)

    def make(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.is_cpu and (dtype is None or argument.dtype is dtype):
            return argument.data_ptr()
        return address_of(argument, dtype)  # which says what is wrong

    return make


def _integer(argument: Any) -> int:
    return DTYPE_CODES[argument] if isinstance(argument, torch.dtype) else int(argument)


# The Python type that is passed as it is, and the maker of all others.
_MADE_BY: dict[Any, tuple[type, Callable[[Any], Any]]] = {
    ctypes.c_int: (int, _integer),
    ctypes.c_int64: (int, _integer),
    ctypes.c_float: (float, float),
}


class NativeFunction:
    """The library's function of a ``prototype``, whose calls go on the tape that is being recorded, if it is taped.

    It takes a tensor for a pointer, whose memory the caller keeps, or an address, or None; a type of ``DTYPE_CODES``
    for its code; and the number of threads, if it is the last parameter, is torch's.  It returns 0, or another number
    if memory ran out, unless it returns a size.  ``plain`` is the function itself, which ``player``, of one that is
    taped, calls with arguments from words.
    """

    def __init__(self, prototype: Prototype, plain: Any, player: Any) -> None:
        self.plain: Callable[..., int] = plain
        self._name, self._takes_threads = prototype.name, prototype.takes_threads
        self._prototype = prototype
        makers = [
            (int, _address_as(item)) if item else _MADE_BY[kind]
            for kind, item in zip(prototype.parameters, prototype.items, strict=True)
        ]
        self._types, self._makers = [kind for kind, _ in makers], [make for _, make in makers]
        self._player = None if player is None else ctypes.cast(player, ctypes.c_void_p).value or 0

    def __call__(self, *given: Any) -> int:
        if self._takes_threads:
            given = (*given, torch.get_num_threads())
        try:
            arguments = [
                one if one.__class__ is kind else make(one)
                for one, kind, make in zip(given, self._types, self._makers, strict=True)
            ]
        except TypeError as error:
            raise TypeError(f"{self._name}({', '.join(self._prototype.names)}): {error}") from error
        tape = _recorded.get()
        if tape is not None and self._player is not None:
            check_extents(self._prototype, given)
            tape.add(self._name, self._player, arguments)
        naming = _naming.get() if tape is None and self._player is not None else None
        if naming is None:
            return self.plain(*arguments)
        with naming(self._name):
            return self.plain(*arguments)


class Tape:
    """Calls in their order, with what must stay alive for them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._names: list[str] = []
        self._entry_type = entry_type(library.max_words())
        self._entries: list[ctypes.Structure] = []
        self._parts: list[Entries | Callable[[], object]] = []  # a call of Python is a collective, with its deadlines
        self._kept: list[list[Any]] = []

    def add(self, name: str, player: int, arguments: list[Any]) -> None:
        """Append a call of the C function ``name``, by its player at this address."""
        entry = self._entry_type(play=player)
        for i, argument in enumerate(arguments):
            entry.words[i] = word_of(argument)
        self._names.append(name)
        self._entries.append(entry)
        self._kept.append(arguments)

    def add_python(self, function: Callable[[], object]) -> None:
        """Append a call of Python."""
        self.finish()
        self._parts.append(function)

    def finish(self) -> None:
        """End the stretch of C calls; later calls begin a new one."""
        if self._entries:
            self._parts.append(Entries(self._library, self._names, self._entries))
            self._names, self._entries = [], []

    def run(self) -> None:
        """Make all calls again."""
        naming = _naming.get()
        for part in self._parts:
            if naming is None:
                part()
            elif isinstance(part, Entries):
                part.call_named(naming)
            else:
                with naming("collective"):
                    part()


_recorded: ContextVar[Tape | None] = ContextVar("recorded_tape", default=None)
_naming: ContextVar[Naming | None] = ContextVar("naming_of_calls", default=None)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Put the calls that this thread makes within the block on ``tape``; they are made too."""
    token = _recorded.set(tape)
    try:
        yield
    finally:
        _recorded.reset(token)
        tape.finish()


@contextmanager
def naming_calls(naming: Naming) -> Iterator[None]:
    """Make the calls of this thread within the block one by one, under their names."""
    token = _naming.set(naming)
    try:
        yield
    finally:
        _naming.reset(token)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, recorded as one call of Python; what it calls is not recorded apart.

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
    """Return whether calls go on a tape now; not within ``call``."""
    return _recorded.get() is not None


@cache
def entry_type(max_words: int) -> type[ctypes.Structure]:
    """``TapeEntry`` of ``tape.h``: a call of up to ``max_words`` arguments."""

    class TapeEntry(ctypes.Structure):
        _fields_ = (("play", ctypes.c_void_p), ("words", ctypes.c_int64 * max_words))

    return TapeEntry


def word_of(argument: Any) -> int:
    """Return the eight bytes of an argument: an integer, a float32, an address or a pointer."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        bits: int = struct.unpack("<i", struct.pack("<f", argument))[0]
        return bits
    if isinstance(argument, int):
        return argument
    return ctypes.addressof(argument.contents)


class Entries:
    """A stretch of C calls, and the position in it at which ``run_tape`` continues."""

    def __init__(self, library: ctypes.CDLL, names: Sequence[str], entries: Sequence[ctypes.Structure]) -> None:
        run_tape: Any = library.run_tape
        self._run_tape = run_tape.plain
        self._names = names
        self._entries = (type(entries[0]) * len(entries))(*entries)
        self._entry_bytes = ctypes.sizeof(entries[0])
        self._position = ctypes.c_int64()
        self._first, self._place = ctypes.addressof(self._entries), ctypes.addressof(self._position)

    def __call__(self, start: int = 0, count: int | None = None) -> None:
        """Make ``count`` calls again from ``start`` on, by default all."""
        first = self._first + start * self._entry_bytes
        if self._run_tape(first, len(self._names) if count is None else count, self._place):
            self._position.value = 0
            raise MemoryError("a recorded kernel has no memory for its work")

    def call_named(self, naming: Naming) -> None:
        """Make each call again under its name."""
        for i, name in enumerate(self._names):
            with naming(name):
                self(i, 1)
