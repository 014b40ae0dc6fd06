"""Where every rank is, and the test hook that makes it fail there.

``TP_ENGINE_FAULT=rank:phase[@n]:action[,...]`` makes a rank misbehave when it reaches a phase (for the n-th time, the
first unless said): the fault matrix of the tests.  Without it, reaching a phase costs one store.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic_ns
from typing import Final, Protocol

from tp_engine import env
from tp_engine.errors import ConfigError
from tp_engine.log import get_logger

logger = get_logger(__name__)

ACTIONS = ("raise", "exit", "kill", "stop", "sleep", "oom")
EXIT_CODE = 7
"""The exit code of the action ``exit``."""

FOR_EVER_S: Final = 3600.0
_COUNT_SHIFT: Final = 8


class Phase(IntEnum):
    """Where a rank is.  A rank that has done its step waits for the next plan, whatever phase it reached last."""

    NONE = 0
    IMPORT = 1
    GROUP_INIT = 2
    LOAD = 3
    PROFILE = 4
    AGREE = 5
    READY = 6
    STEP_BEGIN = 7
    COLLECTIVE = 8
    SAMPLE = 9
    SHUTDOWN = 10

    @property
    def label(self) -> str:
        """The name in faults, logs and files."""
        return self.name.lower()


_COLLECTIVE: Final = int(Phase.COLLECTIVE)
PHASES = tuple(phase.label for phase in Phase if phase)


class Words(Protocol):
    """A list of integers, or a slot of the board."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ``rank`` does when it reaches ``phase`` for the ``nth`` time; ``sleep_s`` is for the action ``sleep``."""

    rank: int
    phase: Phase
    action: str
    nth: int = 1
    sleep_s: float = FOR_EVER_S


def parse_faults(text: str) -> tuple[Fault, ...]:
    """``'1:load:kill,0:step_begin@3:sleep=2'``; ``ConfigError`` names what is wrong and what would be right."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def configured_faults() -> tuple[Fault, ...]:
    """The faults of ``TP_ENGINE_FAULT``."""
    return parse_faults(env.fault())


class PhaseNote:
    """This rank's place in its life, for all to see: the phases it reaches go to ``words[index]``.

    The word is ``count << 8 | phase``, one aligned store.  The count grows with every collective of a step, and where a
    rank has done its part of a start-up phase, so that of two ranks the one that is behind has the smaller count.
    ``words`` is the rank's slot of the job's board, or a list.
    """

    __slots__ = (
        "_count", "_faults", "_in_step", "_index", "_phase", "_reached", "_wait_index", "_waited_ns", "_waits",
        "_words",
    )  # fmt: skip

    def __init__(self, rank: int = 0, *, faults: tuple[Fault, ...] = ()) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._reached: dict[Phase, int] = {}
        self._words: Words = [0]
        self._index = 0
        self._waits: Words = [0]
        self._wait_index = 0
        self._waited_ns = 0
        self._count = 0
        self._phase = Phase.NONE
        self._in_step = False

    def show_on(self, words: Words, index: int, wait_index: int | None = None) -> None:
        """From now on write to ``words[index]``: the rank has found the board.

        ``words[wait_index]`` adds up the nanoseconds that ``collected`` finds.
        """
        words[index] = self._words[self._index]
        self._words, self._index = words, index
        if wait_index is not None:
            self._waits, self._wait_index = words, wait_index

    def reach(self, phase: Phase) -> None:
        """Note that this rank begins ``phase``, and suffer what is configured for it."""
        if phase != Phase.SAMPLE:
            self._count = 0
        self._phase = phase
        self._in_step = phase >= Phase.STEP_BEGIN
        self._words[self._index] = self._count << _COUNT_SHIFT | phase
        if self._faults:
            self._suffer(phase)

    def done(self) -> None:
        """This rank has done its part of a start-up phase and now waits for the others."""
        self._count += 1
        self._words[self._index] = self._count << _COUNT_SHIFT | self._phase

    def collective(self) -> None:
        """``reach`` for each of a step's many collectives; those of the start only count, in their own phase."""
        if not self._in_step:
            self.done()
            return
        if self._faults:
            self._words[self._index] = self._count << _COUNT_SHIFT | _COLLECTIVE
            self._suffer(Phase.COLLECTIVE)
        self._count += 1
        self._words[self._index] = self._count << _COUNT_SHIFT | _COLLECTIVE

    def collected(self, started_ns: int) -> None:
        """A collective of a step that began at ``started_ns`` (CLOCK_MONOTONIC) has ended."""
        if self._in_step:
            self._waited_ns += monotonic_ns() - started_ns
            self._waits[self._wait_index] = self._waited_ns

    @property
    def phase(self) -> Phase:
        """The phase reached last."""
        return split_phase(self._words[self._index])[0]

    def _suffer(self, phase: Phase) -> None:
        count = self._reached[phase] = self._reached.get(phase, 0) + 1
        for fault in self._faults:
            if fault.phase == phase and fault.nth == count:
                _act(fault)


def split_phase(word: int) -> tuple[Phase, int]:
    """The phase and the count in a ``PhaseNote``'s word."""
    return Phase(word & (1 << _COUNT_SHIFT) - 1), word >> _COUNT_SHIFT


def _act(fault: Fault) -> None:
    what = f"injected by TP_ENGINE_FAULT: rank {fault.rank} in {fault.phase.label}"
    logger.warning("%s: %s", what, fault.action)
    match fault.action:
        case "raise":
            raise RuntimeError(what)
        case "oom":
            raise MemoryError(f"out of memory, {what}")
        case "exit":
            os._exit(EXIT_CODE)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(fault.sleep_s)


def _parse(part: str) -> Fault:
    pieces = part.split(":")
    if len(pieces) != 3:
        raise _wrong(part, "it must have three parts")
    rank, (name, at, nth), (action, equals, seconds) = pieces[0], pieces[1].partition("@"), pieces[2].partition("=")
    if not rank.isdecimal():
        raise _wrong(part, f"{rank!r} is no rank")
    if name not in PHASES:
        raise _wrong(part, f"{name!r} is no phase; the phases are {', '.join(PHASES)}")
    if at and not (nth.isdecimal() and int(nth) > 0):
        raise _wrong(part, f"{nth!r} is no count")
    if action not in ACTIONS or (equals and action != "sleep"):
        raise _wrong(part, f"{pieces[2]!r} is no action; the actions are {', '.join(ACTIONS)}")
    try:
        sleep_s = float(seconds) if equals else FOR_EVER_S
    except ValueError:
        raise _wrong(part, f"{seconds!r} is no number of seconds") from None
    return Fault(rank=int(rank), phase=Phase[name.upper()], action=action, nth=int(nth or 1), sleep_s=sleep_s)


def _wrong(part: str, why: str) -> ConfigError:
    return ConfigError(
        f"TP_ENGINE_FAULT has {part!r}: {why}; write rank:phase:action, such as 1:load:kill, or 0:step_begin@3:sleep=2"
    )
