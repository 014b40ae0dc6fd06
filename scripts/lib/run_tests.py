"""Run the tests' two sessions one after the other: ``run_tests.py [--all | --rest]``; see scripts/test.

The processor time of each is printed: user and system time of all its processes, including orphans, which this process
adopts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec

LAST_PROCESS_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
# Tests wait about half of the time for other processes, so a worker without tests takes some from another.
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "--expected-skips", "tests/expected_skips.txt")
SESSIONS = ("tests", "tests/interpreted") if find_spec("triton") else ("tests",)


def cpu_seconds() -> float:
    """Processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_reaping(command: list[str]) -> int:
    """Run ``command`` and return its exit code.  Adopted processes are waited for when they end: a test that waits for
    a process to be gone would find a zombie."""
    process = subprocess.Popen(command)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def wait_for_all() -> None:
    """Wait for the remaining processes, which end because the one that they serve has ended."""
    deadline_s = time.monotonic() + LAST_PROCESS_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)


def run_session(path: str, tier: list[str]) -> int:
    """Run the tests in ``path``, wait for the processes that they started, and return pytest's exit code."""
    began_s, before_s = time.monotonic(), cpu_seconds()
    code = run_reaping([sys.executable, *PYTEST, *tier, path])
    wait_for_all()
    used_s, taken_s = cpu_seconds() - before_s, time.monotonic() - began_s
    print(f"[tp_engine] {path}: {used_s:.0f} s of processor time in {taken_s:.0f} s", file=sys.stderr)
    return code


def main() -> int:
    tier = {(): ["-m", "not slow"], ("--rest",): ["-m", "slow"], ("--all",): []}[tuple(sys.argv[1:])]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before_s = cpu_seconds()  # of setting up the environment, in the shell that became this process
    codes = [run_session(path, tier) for path in SESSIONS]
    print(f"[tp_engine] all tests: {cpu_seconds() - before_s:.0f} s of processor time", file=sys.stderr)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
