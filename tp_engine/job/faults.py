"""A test hook that makes a rank fail at a chosen point.

``TP_ENGINE_FAULT=rank:phase[@n]:action[,...]``: the rank does the action when it reaches the phase for the n-th time
(the first by default), or each time (``@*``).  The fault matrix of the tests uses it.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tp_engine.errors import ConfigError
from tp_engine.job.progress import RankPhase
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

ACTIONS = ("raise", "exit", "kill", "stop", "sleep", "oom")
EXIT_CODE = 7
"""The exit code of the action ``exit``."""

FOR_EVER_S: Final = 3600.0
ALWAYS: Final = 0
PHASES = tuple(phase.label for phase in RankPhase if phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ``rank`` does when it reaches ``phase`` for the ``nth`` time, or each time if ``nth`` is ``ALWAYS``;
    ``sleep_s`` is for the action ``sleep``."""

    rank: int
    phase: RankPhase
    action: str
    nth: int = 1
    sleep_s: float = FOR_EVER_S


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse ``'1:load:kill,0:step_begin@3:sleep=2'``; ``ConfigError`` names the mistake and the remedy."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


class FaultInjector:
    """Called with each phase that a rank reaches; acts when one of ``faults`` names the phase and the count."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._reached: dict[RankPhase, int] = {}

    def __call__(self, phase: RankPhase) -> None:
        count = self._reached[phase] = self._reached.get(phase, 0) + 1
        for fault in self._faults:
            if fault.phase == phase and fault.nth in (count, ALWAYS):
                _act(fault)


def fault_injector(rank: int, faults: Sequence[Fault] | None = None) -> FaultInjector | None:
    """Return the ``on_phase`` of a ``RankProgress`` for ``rank``; None if no fault of ``faults``, by default those of
    ``TP_ENGINE_FAULT``, is for it."""
    own = [fault for fault in (parse_faults(env.FAULT.read()) if faults is None else faults) if fault.rank == rank]
    return FaultInjector(own) if own else None


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
    if at and nth != "*" and not (nth.isdecimal() and int(nth) > 0):
        raise _wrong(part, f"{nth!r} is no count")
    if action not in ACTIONS or (equals and action != "sleep"):
        raise _wrong(part, f"{pieces[2]!r} is no action; the actions are {', '.join(ACTIONS)}")
    try:
        sleep_s = float(seconds) if equals else FOR_EVER_S
    except ValueError:
        raise _wrong(part, f"{seconds!r} is no number of seconds") from None
    count = ALWAYS if nth == "*" else int(nth or 1)
    return Fault(rank=int(rank), phase=RankPhase[name.upper()], action=action, nth=count, sleep_s=sleep_s)


def _wrong(part: str, why: str) -> ConfigError:
    return ConfigError(
        f"TP_ENGINE_FAULT has {part!r}: {why}; write rank:phase:action, such as 1:load:kill, or 0:step_begin@3:sleep=2"
    )
