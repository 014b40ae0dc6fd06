"""One cell of the matrix: a rank of a job fails in one way in one phase, and the job must keep the promises.

::

    action         how the others notice                         limit that passes before the 10 s
    raise, oom     the rank leaves its traceback and ends        none
    exit, kill     its process ends                              none
    stop           no sign of life                               watchdog_timeout_s (before it registers: start-up's)
    sleep          signs of life, but no progress                watchdog_timeout_s (while starting: start-up's)
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault_jobs import (
    DETECTION_S,
    HARD_LIMIT_S,
    OVERFLOWING,
    STARTUP_LIMIT_S,
    STRUCK,
    Job,
    interrupt,
    job,
    port_is_free,
)
from tests.faults.client import Asking
from tests.faults.gate import Gate
from tp_engine.job.faults import ACTIONS, EXIT_CODE, PHASES
from tp_engine.job.flight_recorder.record import load_record

START_PHASES = PHASES[: PHASES.index("step_begin")]
STEP_PHASES = ("step_begin", "move", "collective", "sample")
ORDER_PHASES = ("prepare", "commit")  # these jobs have no orders: tests/ranks/test_orders.py
IMAGE_PHASES = ("encode",)  # nor images: tests/ranks/test_image_features.py
_STARTS_WITHIN_S = 150.0


@dataclass(frozen=True, slots=True)
class Case:
    """``kind`` of job, and the fault."""

    kind: str
    rank: int
    phase: str
    action: str
    num_ranks: int = 2

    def __str__(self) -> str:
        return f"{self.kind}-{self.num_ranks}-rank{self.rank}-{self.phase}-{self.action}"

    @property
    def fault(self) -> str:
        """The value of TP_ENGINE_FAULT; faults in a step's phases come after a few tokens or moves."""
        return f"{self.rank}:{self.phase}{'@4' if self.phase in STEP_PHASES else ''}:{self.action}"

    @property
    def load(self) -> dict[str, Any]:
        """What the job has to do: for faults in moves, more than fits into the pool; and the limit of a start that a
        fault holds up."""
        if self.phase in START_PHASES and self.limit_s:
            return {"rounds": 2, "options": {"startup_timeout_s": STARTUP_LIMIT_S}}
        if self.phase != "move":
            return {"rounds": 2}
        options, prompts = OVERFLOWING
        return {"rounds": len(prompts) if self.kind == "batch" else 2, "prompts": prompts, "options": options}

    @property
    def limit_s(self) -> float:
        """Time that must pass before the fault may be noticed."""
        if self.action not in ("stop", "sleep"):
            return 0.0
        return STARTUP_LIMIT_S if self.phase in START_PHASES else HARD_LIMIT_S

    @property
    def is_alone(self) -> bool:
        """Whether it is a script without ranks on the board yet, so that no rank can report its end."""
        if self.kind != "script" or self.rank != 0 or self.action in ("raise", "oom"):
            return False
        return self.phase == "import" or (self.phase == "group_init" and self.action in ("exit", "kill"))

    @property
    def outlives_its_ranks(self) -> bool:
        """Whether a user's script itself sleeps or is stopped: its ranks end; the engine must not end the script."""
        return self.kind == "script" and self.rank == 0 and self.action in ("stop", "sleep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``seconds`` from the fault to the end of the last process; ``problems`` are broken promises."""

    case: Case
    seconds: float
    code: int | None
    problems: tuple[str, ...]
    output: str = ""


def whole_matrix() -> Iterator[Case]:
    """Phases x actions x ranks 0 and 1 x (script, torchrun), and a few cells with four ranks."""
    phases = [phase for phase in PHASES if phase not in (*ORDER_PHASES, *IMAGE_PHASES)]
    for phase, action, rank in itertools.product(phases, ACTIONS, (0, 1)):
        yield Case("script", rank, phase, action)
        yield Case("serve" if phase in (*STEP_PHASES, "ready") else "batch", rank, phase, action)
    cells = {"load": "kill", "step_begin": "stop", "move": "kill", "collective": "raise", "sample": "exit"}
    for phase, action in cells.items():
        yield Case("script", 2, phase, action, num_ranks=4)
        yield Case("batch", 3, phase, action, num_ranks=4)


def run_case(case: Case, folder: Path, gate: Gate | None = None) -> Outcome:
    """Run the job and compare with the promises.  A broken promise goes into ``problems`` and raises nothing."""
    gate, load = gate or Gate(), case.load
    with gate, job(case.kind, folder, fault=case.fault, num_ranks=case.num_ranks, **load) as running:
        problems: list[str] = []
        asking: Asking | None = None
        code: int | None = None
        struck_s = time.monotonic()
        try:
            asking = _lead_to_fault(case, running)
            struck_s = running.wait_for(STRUCK, _STARTS_WITHIN_S)
            slack_s = running.slack_s()
            gate.open()
            code = _await_end(case, running, struck_s + case.limit_s + DETECTION_S + slack_s)
        except AssertionError as error:
            problems.append(str(error).partition("\n")[0])
        ended_s = time.monotonic()
        if asking is not None and code is not None:
            problems += asking.problems()
            problems += [] if port_is_free(asking.url) else [f"a process still listens at {asking.url}"]
        if code is not None:
            problems += _wrong_code(case, code) + _missing_words(case, running) + _record_problems(case, running)
        return Outcome(case, ended_s - struck_s, code, tuple(problems), running.text() if problems else "")


def _lead_to_fault(case: Case, running: Job) -> Asking | None:
    """A server needs requests to take steps, and a signal to shut down; the other jobs do both by themselves."""
    if case.kind != "serve" or case.phase not in (*STEP_PHASES, "shutdown"):
        return None
    running.wait_ready(_STARTS_WITHIN_S)
    asking = Asking(running.url())
    if case.phase == "shutdown":
        interrupt(running.process, signal.SIGTERM)
    return asking


def _await_end(case: Case, running: Job, deadline_s: float) -> int:
    """The job's exit code.  If only a user's script is left, wake it up; if it sleeps for ever, kill it."""
    if case.outlives_its_ranks:
        while len(running.processes()) > 1:
            assert time.monotonic() < deadline_s, f"the ranks of a script that does not run live on:\n{running.tail()}"
            time.sleep(0.02)
        interrupt(running.process, signal.SIGCONT if case.action == "stop" else signal.SIGKILL)
        deadline_s += DETECTION_S
    return running.wait_end(deadline_s)


def _wrong_code(case: Case, code: int) -> list[str]:
    """Check that the code is not 0; if the fault ends the job's own process, its code must be the fault's."""
    expected = {"exit": EXIT_CODE, "kill": -signal.SIGKILL}.get(case.action)
    if case.outlives_its_ranks and case.action == "sleep":
        expected = -signal.SIGKILL
    if case.is_alone and case.action == "stop":  # woken up, it goes on
        expected = 0
    if case.kind == "script" and case.rank == 0 and expected is not None:
        return [] if code == expected else [f"exit code {code}, expected {expected}"]
    return [] if code != 0 else ["exit code 0 although no stop was asked for"]


def _missing_words(case: Case, running: Job) -> list[str]:
    """The log must name the rank, the phase and the cause; the line of the fault hook does not count."""
    if case.is_alone:
        return []
    text = "".join(line for _, line in running.lines if not line.rstrip().endswith(f": {case.action}"))
    wanted = [f"rank {case.rank}", case.phase]
    wanted += {
        "raise": ["injected by TP_ENGINE_FAULT"],
        "oom": ["out of memory, injected by TP_ENGINE_FAULT"],
    }.get(case.action, [])
    return [f"the output does not say {word!r}" for word in wanted if word not in text]


def _record_problems(case: Case, running: Job) -> list[str]:
    """Once the board exists, the process that ends the job must leave a record that blames the failed rank.

    If rank 0 ends while the ranks meet, it may be dead before another rank is on the board.
    """
    if case.phase in ("import", "shutdown") or case.is_alone:
        return []
    records = [load_record(path) for path in running.flight_records.glob("*.json")]
    if not records:
        may_be_nobody = case.rank == 0 and case.phase == "group_init" and case.action in ("exit", "kill")
        return [] if may_be_nobody else ["no flight record"]
    named = {record.culprit for record in records}
    return [] if case.rank in named else [f"the flight record blames rank {named}"]
