"""``python -m tests.faults``: run the matrix and the storms, several jobs at once; print a table and one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

from tests.faults.cases import Case, Outcome, run_case, whole_matrix
from tests.faults.gate import Gate
from tests.faults.hosts import HostCase, HostOutcome, host_matrix, run_host_case
from tests.faults.storms import Storm, StormOutcome, run_storm, storms
from tests.namespaces import NO_NAMESPACES, can_make_namespaces
from tp_engine.cpu.library import native_library

_WAITING = 6


AnyCase: TypeAlias = Case | Storm | HostCase
AnyOutcome: TypeAlias = Outcome | StormOutcome | HostOutcome


def chosen(options: argparse.Namespace) -> list[AnyCase]:
    """The cells and storms whose names contain all of the given words; those with long waits run first."""
    rng = random.Random(options.seed)
    everything: list[AnyCase] = []
    if options.hosts:
        everything += host_matrix()
    else:
        everything += whole_matrix() if options.part != "storms" else []
        everything += storms(rng, times=options.times) if options.part != "matrix" else []
    found = [case for case in everything if all(word in str(case) for word in options.words)]
    rng.shuffle(found)
    return sorted(found, key=lambda case: -case.limit_s if isinstance(case, Case) else 0.0)


def run_one(case: AnyCase, places: threading.Semaphore) -> AnyOutcome:
    """Run one case in its own folder."""
    with tempfile.TemporaryDirectory(prefix="tp_engine-fault-") as folder:
        gate = Gate(places)
        if isinstance(case, HostCase):
            return run_host_case(case, Path(folder), gate)
        return run_case(case, Path(folder), gate) if isinstance(case, Case) else run_storm(case, Path(folder), gate)


def run_all(cases: Sequence[AnyCase], num_starting: int, show: Callable[[AnyOutcome], None]) -> list[AnyOutcome]:
    """Run all.  ``num_starting`` jobs start at once, because a start needs the cores; any number may wait to end."""
    places = threading.Semaphore(num_starting)
    with ThreadPoolExecutor(num_starting + _WAITING) as pool:
        found = []
        for future in as_completed([pool.submit(run_one, case, places) for case in cases]):
            found.append(future.result())
            show(found[-1])
        return found


def show(outcome: AnyOutcome) -> None:
    """Print one line, then the problems and the end of the output."""
    if isinstance(outcome, HostOutcome) and outcome.noticed_s is not None:
        print(f"{outcome.case!s:45} noticed on both hosts after {outcome.noticed_s:.2f} s", flush=True)
    verdict = "ok" if not outcome.problems else "; ".join(outcome.problems)
    print(f"{outcome.case!s:45} {outcome.seconds:6.1f} s  exit {outcome.code!s:>5}  {verdict}", flush=True)
    if outcome.problems:
        print("    | " + "\n    | ".join(outcome.output.splitlines()[-60:]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cases; returns exit code 0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="scripts/test_faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="run what has all of these in its name, such as script load kill")
    parser.add_argument("--part", choices=("all", "matrix", "storms"), default="all")
    parser.add_argument("--hosts", action="store_true", help="faults over two hosts, which are network namespaces")
    parser.add_argument("--times", type=int, default=1, help="rounds of storms (default: 1)")
    parser.add_argument("--starting", type=int, default=len(os.sched_getaffinity(0)), help="jobs that start at once")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the storms; default: the time")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it
    if options.hosts and not can_make_namespaces():
        parser.error(f"{NO_NAMESPACES}; run it as root, with iproute2 installed")
    native_library()  # compile the kernels now: the jobs have time limits
    started_s = time.monotonic()
    found = run_all(chosen(options), 1 if options.hosts else options.starting, show)
    failed = [str(outcome.case) for outcome in found if outcome.problems]
    report: dict[str, Any] = {
        "faults": "passed" if not failed else "failed",
        "cases": len(found),
        "failed": failed,
        "slowest_s": round(max((outcome.seconds for outcome in found), default=0.0), 1),
        "seconds": round(time.monotonic() - started_s, 1),
        "seed": options.seed,
        "starting": options.starting,
    }
    print(json.dumps(report), flush=True)
    return 0 if found and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
