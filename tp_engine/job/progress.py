"""How far each rank has come, for the other ranks and the watchdogs to see, and in words for those who wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic_ns
from typing import Final, TypeAlias

_COUNT_SHIFT: Final = 8


class RankPhase(IntEnum):
    """Where a rank is.  Between two steps it waits for a plan, and the phase stays the last one that it reached."""

    NONE = 0
    IMPORT = 1
    GROUP_INIT = 2
    LOAD = 3
    PROFILE = 4
    AGREE = 5
    READY = 6
    STEP_BEGIN = 7
    MOVE = 8
    COLLECTIVE = 9
    SAMPLE = 10
    SHUTDOWN = 11
    PREPARE = 12
    COMMIT = 13
    ENCODE = 14

    @property
    def label(self) -> str:
        """The name in faults, logs and files."""
        return self.name.lower()


_COLLECTIVE: Final = int(RankPhase.COLLECTIVE)


Words: TypeAlias = "list[int] | memoryview[int]"
"""A list of integers, or a slot of the board."""


class RankProgress:
    """A rank's progress: each phase that it reaches is written to ``words[index]``.

    The word is ``count << 8 | phase``, one aligned store.  The count grows with every collective of a step, and when
    the rank has done its part of a start-up phase.  Of two ranks in the same phase, the one with the smaller count is
    behind.  ``words`` is the rank's slot of the job's board, or a list.  ``on_phase`` is called with each phase that
    the rank reaches, and may raise: fault injection uses it (``faults.py``).
    """

    __slots__ = (
        "_count", "_in_step", "_index", "_on_phase", "_phase", "_wait_index", "_waited_ns", "_waits", "_words",
    )  # fmt: skip

    def __init__(self, on_phase: Callable[[RankPhase], None] | None = None) -> None:
        self._on_phase = on_phase
        self._words: Words = [0]
        self._index = 0
        self._waits: Words = [0]
        self._wait_index = 0
        self._waited_ns = 0
        self._count = 0
        self._phase = RankPhase.NONE
        self._in_step = False

    def show_on(self, words: Words, index: int, wait_index: int | None = None) -> None:
        """Write to ``words[index]`` of the board from now on.  ``words[wait_index]`` gets the sum of the nanoseconds
        that ``collected`` measures."""
        words[index] = self._words[self._index]
        self._words, self._index = words, index
        if wait_index is not None:
            self._waits, self._wait_index = words, wait_index

    def reach(self, phase: RankPhase) -> None:
        """Record that this rank begins ``phase``."""
        if phase != RankPhase.SAMPLE:
            self._count = 0
        self._phase = phase
        self._in_step = phase >= RankPhase.STEP_BEGIN
        self._words[self._index] = self._count << _COUNT_SHIFT | phase
        if self._on_phase is not None:
            self._on_phase(phase)

    def back(self, phase: RankPhase) -> None:
        """Record that this rank goes on with ``phase``, which it had reached before a part of it with its own name."""
        self._phase = phase
        self._words[self._index] = self._count << _COUNT_SHIFT | phase

    def done(self) -> None:
        """Record that this rank has done its part of a start-up phase and now waits for the others."""
        self._count += 1
        self._words[self._index] = self._count << _COUNT_SHIFT | self._phase

    def collective(self) -> None:
        """``reach`` for each collective of a step; a collective of the start only adds to the count of its phase."""
        if not self._in_step:
            self.done()
            return
        if self._on_phase is not None:
            self._words[self._index] = self._count << _COUNT_SHIFT | _COLLECTIVE
            self._on_phase(RankPhase.COLLECTIVE)
        self._count += 1
        self._words[self._index] = self._count << _COUNT_SHIFT | _COLLECTIVE

    def collected(self, started_ns: int) -> None:
        """Record that a step's collective, begun at ``started_ns`` (CLOCK_MONOTONIC), has ended."""
        if self._in_step:
            self._waited_ns += monotonic_ns() - started_ns
            self._waits[self._wait_index] = self._waited_ns

    @property
    def phase(self) -> RankPhase:
        """The phase reached last."""
        return split_phase(self._words[self._index])[0]


def split_phase(word: int) -> tuple[RankPhase, int]:
    """Return the phase and the count in a ``RankProgress``'s word."""
    return RankPhase(word & (1 << _COUNT_SHIFT) - 1), word >> _COUNT_SHIFT


@dataclass(frozen=True, slots=True)
class Progress:
    """What a process is doing at its start; of work that can be counted, how much is ``done``, of how much if known."""

    what: str
    done: int | None = None
    total: int | None = None
    unit: str = ""

    def __str__(self) -> str:
        """Return it as ``compiling the CPU kernels: 3 of 17 files``."""
        if self.done is None:
            return self.what
        return f"{self.what}: {self.done} {'' if self.total is None else f'of {self.total} '}{self.unit}"


_listeners: list[Callable[[Progress], None]] = []


def tell_progress(what: str, done: int | None = None, total: int | None = None, unit: str = "") -> None:
    """Say what this process is doing at its start (``Progress``), from any thread; nobody need listen."""
    for listener in tuple(_listeners):
        listener(Progress(what, done, total, unit))


@contextmanager
def hearing_progress(listener: Callable[[Progress], None]) -> Iterator[None]:
    """Let ``listener`` get what ``tell_progress`` says in this process, within."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
