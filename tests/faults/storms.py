"""Kills and signals from outside, at random moments: promises 1 to 6 without the fault hook.

::

    kill rank r, stop rank r     while loading, idle, decoding     the job ends non-zero, in time
    kill the agent               at any moment (torchrun)          every rank is gone within 10 s
    kill the script              at any moment                     every rank is gone within 10 s
    SIGTERM, SIGINT, twice       at any moment (serve, batch)      a bounded end
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fault_jobs import DETECTION_S, HARD_LIMIT_S, STARTUP_LIMIT_S, Job, interrupt, job, port_is_free
from tests.faults.client import Asking
from tests.faults.gate import Gate

MOMENTS = ("loading", "idle", "decoding")
_STARTS_WITHIN_S = 150.0
_STOP_S = 20.0
_START_TAKES_S = 4.0
_AGENT_KILLS_S = 30.0
_OTHERS_START_S = 10.0


@dataclass(frozen=True, slots=True)
class Storm:
    """``target`` is a rank's number, or ``agent``: the script, or torchrun, which passes signals on to all ranks."""

    kind: str
    target: str
    what: str
    moment: str
    seed: int = 0
    num_ranks: int = 2

    @property
    def is_unnoticed(self) -> bool:
        """Whether it is a user's script that does not call the engine: the log says so; the script must live on."""
        return self.kind == "script" and self.moment == "idle" and self.target not in ("0", "agent")

    def __str__(self) -> str:
        return f"{self.kind}-{self.num_ranks}-{self.what}-{self.target}-{self.moment}-{self.seed}"


def storms(rng: random.Random, *, times: int) -> Iterator[Storm]:
    """``times`` rounds over all storms above, each with new random moments."""
    for _ in range(times):
        for moment in MOMENTS:
            for rank in ("0", "1"):
                kinds = ("script", "serve") if moment != "loading" else ("script", "batch")
                for kind in kinds:
                    yield Storm(kind, rank, "kill", moment, rng.randrange(1 << 30))
            yield Storm("script", "1", "stop", moment, rng.randrange(1 << 30))
            yield Storm("serve", rng.choice("01"), "stop", moment, rng.randrange(1 << 30))
            yield Storm("serve", "agent", "kill", moment, rng.randrange(1 << 30))
            yield Storm("script", "agent", "kill", moment, rng.randrange(1 << 30))
            yield Storm("serve", "agent", rng.choice(("term", "int", "term twice")), moment, rng.randrange(1 << 30))
        yield Storm("batch", "agent", rng.choice(("term", "int")), "decoding", rng.randrange(1 << 30))
        yield Storm("script", str(rng.randrange(4)), "kill", rng.choice(MOMENTS), rng.randrange(1 << 30), num_ranks=4)


@dataclass(frozen=True, slots=True)
class StormOutcome:
    """As ``cases.Outcome``."""

    case: Storm
    seconds: float
    code: int | None
    problems: tuple[str, ...]
    output: str = ""


def run_storm(storm: Storm, folder: Path, gate: Gate | None = None) -> StormOutcome:
    """Start the job, wait for the moment, strike, and compare with the promises."""
    rng = random.Random(storm.seed)
    rounds = 0 if storm.moment == "idle" and storm.kind == "script" else 100_000 if storm.kind == "script" else 300
    gate, options = gate or Gate(), {"startup_timeout_s": STARTUP_LIMIT_S}
    with gate, job(storm.kind, folder, num_ranks=storm.num_ranks, rounds=rounds, options=options) as running:
        problems: list[str] = []
        struck_s, code = time.monotonic(), None
        try:
            asking = _await_moment(storm, running, rng)
            struck_s, slack_s = time.monotonic(), running.slack_s()
            _strike(storm, running, rng)
            gate.open()
            deadline_s = struck_s + _limit_s(storm) + slack_s
            if storm.is_unnoticed:
                running.wait_for("flight record", deadline_s - time.monotonic())
                interrupt(running.process, signal.SIGINT)
            code = running.wait_end(deadline_s + DETECTION_S * storm.is_unnoticed)
            problems += _wrong_code(storm, code)
            if asking is not None and storm.target != "agent" and storm.what == "kill" and storm.target != "0":
                problems += asking.problems()
            if asking is not None and not port_is_free(asking.url):
                problems.append(f"a process still listens at {asking.url}")
        except AssertionError as error:
            problems.append(str(error).partition("\n")[0])
        return StormOutcome(
            storm, time.monotonic() - struck_s, code, tuple(problems), running.text() if problems else ""
        )


def _await_moment(storm: Storm, running: Job, rng: random.Random) -> Asking | None:
    """Reach ``storm.moment``, and a random instant within it."""
    if storm.moment == "loading":
        time.sleep(rng.uniform(0.0, _START_TAKES_S))
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while storm.target.isdecimal() and running.rank(int(storm.target)) is None:
            assert time.monotonic() < deadline_s, f"rank {storm.target} never came:\n{running.tail()}"
            time.sleep(0.02)
        return None
    if storm.kind == "batch":
        running.wait_for("", _STARTS_WITHIN_S)
        time.sleep(_START_TAKES_S + rng.uniform(0.0, 2.0))
        return None
    running.wait_ready(_STARTS_WITHIN_S)
    asking = Asking(running.url()) if storm.kind == "serve" and storm.moment == "decoding" else None
    time.sleep(rng.uniform(0.0, 0.2) if asking else rng.uniform(0.0, 1.0))
    return asking


def _strike(storm: Storm, running: Job, rng: random.Random) -> None:
    target = running.process if storm.target == "agent" else running.rank(int(storm.target))
    if target is None:
        return
    match storm.what:
        case "kill":
            interrupt(target, signal.SIGKILL)
        case "stop":
            interrupt(target, signal.SIGSTOP)
        case "term" | "int":
            interrupt(target, signal.SIGTERM if storm.what == "term" else signal.SIGINT)
        case "term twice":
            interrupt(target, signal.SIGTERM)
            threading.Event().wait(rng.uniform(0.0, 1.0))
            interrupt(target, signal.SIGTERM)


def _limit_s(storm: Storm) -> float:
    if storm.what in ("term", "int", "term twice"):
        return _STOP_S
    if storm.what != "stop":
        return DETECTION_S
    if storm.moment != "loading":
        return DETECTION_S + HARD_LIMIT_S
    # The limit counts from the last progress of the other ranks, which still start.  If a rank under torchrun stops
    # before it is on the board, only the agent can end it.
    return DETECTION_S + _OTHERS_START_S + STARTUP_LIMIT_S + (_AGENT_KILLS_S if storm.kind != "script" else 0.0)


def _wrong_code(storm: Storm, code: int) -> list[str]:
    """After a kill or a stop the code must not be 0.  After a signal any code is good: torchrun reports a failure."""
    is_signal = storm.what in ("term", "int", "term twice")
    return [] if is_signal or code != 0 else ["exit code 0 although no stop was asked for"]
