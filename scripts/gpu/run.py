"""Run one section as a child process with a time limit; show and log its output, and keep its JSON line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpu.figures import figures_of, why_not_profiled
from gpu.sections import Section
from gpu.wheels import missing

ROOT = Path(__file__).resolve().parents[2]
# A server takes a moment to stop, as does pytest to say which tests have failed so far.
_STOPS = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
STOP_S = sum(grace_s for _, grace_s in _STOPS)
_LEAST_S, _READ_S = 15.0, 5.0


@dataclass(kw_only=True)
class Outcome:
    """``status`` is passed, failed (with the exit code in ``note``), timeout, or skipped."""

    name: str
    status: str
    note: str = ""
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    failed_tests: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether the section ran and failed."""
        return self.status in ("failed", "timeout")

    @property
    def verdict(self) -> str:
        """The section's result in one line: its own verdict, the goals of its figures, or how it ended."""
        if "verdict" in self.report:
            return str(self.report["verdict"])
        if self.status == "passed" and (reason := why_not_profiled(self.report)):
            return f"passed, but without times of kernels: {reason}"
        goals = [figure for figure in figures_of(self.report) if figure.goal is not None]
        if self.status == "passed" and goals:
            missed = [figure.label for figure in goals if figure.verdict == "missed"]
            return f"{len(goals) - len(missed)} of {len(goals)} goals met" + "".join(
                f"; missed: {one}" for one in missed
            )
        return " ".join(filter(None, (self.status, self.note)))


def why_not(section: Section, num_gpus: int, remaining_s: float) -> Outcome | None:
    """The reason why a section cannot run here; None if it can."""
    lacking = missing(section.modules)
    if section.min_gpus > num_gpus:
        return Outcome(name=section.name, status="skipped", note=f"needs {section.min_gpus} GPUs, found {num_gpus}")
    if lacking:
        note = f"not installed: {', '.join(lacking)}"
        return Outcome(name=section.name, status="skipped", note=note, missing=lacking)
    if section.prefix and shutil.which(section.prefix[0]) is None:
        return Outcome(name=section.name, status="skipped", note=f"there is no {section.prefix[0]} here")
    if remaining_s < _LEAST_S:
        return Outcome(name=section.name, status="skipped", note="no time left within --budget-s")
    return None


def run_section(section: Section, log: IO[str], limit_s: float) -> Outcome:
    """Run a section to its end, or for ``limit_s``; then end its whole process group."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        section.argv(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=_environment(section), start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=_follow, args=(process.stdout, log, lines), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        _end(process)
    reader.join(_READ_S)
    outcome = Outcome(name=section.name, status="passed", seconds=round(time.monotonic() - started_s, 1))
    outcome.report = last_json(lines)
    ends = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    outcome.failed_tests = [line.partition(" ")[2].partition(" - ")[0].strip() for line in ends]
    if timed_out:
        outcome.status, outcome.note = "timeout", f"ended after {limit_s:.0f} s"
    elif process.returncode:
        outcome.status, outcome.note = "failed", f"exit code {process.returncode}"
    outcome.note = "; ".join(filter(None, (outcome.note, _test_counts(lines))))
    return outcome


def last_json(lines: list[str]) -> dict[str, Any]:
    """The JSON object of the last line that holds one; empty if no line does."""
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(line)
                return found
    return {}


def _test_counts(lines: list[str]) -> str:
    """pytest's last line, such as ``12 passed, 1 skipped in 3.20s``."""
    counts = [line.strip("= \n") for line in lines if " in " in line and (" passed" in line or " failed" in line)]
    return counts[-1] if counts else ""


def _follow(output: IO[str] | None, log: IO[str], lines: list[str]) -> None:
    assert output is not None
    for line in output:
        lines.append(line)
        print("    " + line, end="", flush=True)
        log.write(line)
        log.flush()


def _environment(section: Section) -> dict[str, str]:
    """An environment that imports from the checkout, uses no network, and does not buffer output.  What tests compute
    on the CPU takes less time than to compile its kernels."""
    scripts = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"TP_ENGINE_NATIVE": "0"} if "pytest" in section.command else {}
    return {**os.environ, "PYTHONPATH": scripts, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **own}


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt the process, then ask its group to end, then kill what remains of it."""
    for number, grace_s in _STOPS:
        with contextlib.suppress(ProcessLookupError):
            if number != signal.SIGINT:
                os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
