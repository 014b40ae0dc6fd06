"""Processes that must not outlive the process that started them.  Oracle: the kernel's own table of processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tp_engine.engine import processes
from tp_engine.engine.processes import ChildRanks

DEADLINE_S = 100.0

_ORPHAN = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
from tp_engine.engine.processes import die_with_launcher
print(os.getppid(), flush=True)
die_with_launcher()
print("lives", flush=True)
"""

_AGENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
os._exit(0)
"""


def told_by_orphan(environment: dict[str, str]) -> list[str]:
    """The output of a process whose agent ended before it looked; both share one pipe."""
    agent = subprocess.run(
        [sys.executable, "-c", _AGENT, _ORPHAN],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[3]), **environment},
    )
    return agent.stdout.split()


def test_a_rank_whose_agent_was_killed_while_it_imported_ends() -> None:
    """Oracle: the process writes no more once it has looked; a process of another launcher continues."""
    first, *others = told_by_orphan({"TORCHELASTIC_RUN_ID": "x"})
    is_python = b"python" in Path(f"/proc/{first}/cmdline").read_bytes()
    assert others == (["lives"] if first != "1" or is_python else [])
    assert told_by_orphan({})[1:] == ["lives"]


_CHILD = """
import os, time
from tp_engine.engine.processes import die_with_parent
die_with_parent(os.getppid())
print("watching", flush=True)
time.sleep(3600)
"""

_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE).stdout.readline()
"""


def test_a_child_ends_with_its_parent() -> None:
    """Oracle: the inherited standard error reaches its end, although the child would sleep for an hour."""
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", _PARENT, _CHILD]
    subprocess.run(command, stderr=subprocess.PIPE, timeout=DEADLINE_S, check=True, env=environment)


class _Clock:
    """Seconds that pass only while somebody waits for a process, which runs for ever or ``runs_s``."""

    def __init__(self, runs_s: float) -> None:
        self.now_s, self._runs_s = 0.0, runs_s
        self.is_killed, self.pid = False, 7

    def wait(self, timeout_s: float = 0.0) -> None:
        self.now_s += timeout_s
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout_s)

    def poll(self) -> int | None:
        return 0 if self.is_killed or self.now_s >= self._runs_s else None

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("share", "runs_s", "ends_s", "is_killed"),
    [
        (0.0, 4.0, 4.0, False),  # ends by itself
        (0.0, 1e9, 10.0, True),  # stands still
        (0.01, 1e9, 10.0, True),  # only a thread that looks at the others runs
        (1.0, 1e9, 10.0, True),  # spins
        (0.1, 60.0, 60.0, False),  # works, and other processes have nine tenths of the machine
        (0.1, 1e9, 100.0, True),
    ],
)
def test_ranks_that_end(
    share: float, runs_s: float, ends_s: float, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 10 s of a rank that does not work, or 10 s of the processor; time is made up."""
    child = _Clock(runs_s)
    monkeypatch.setattr(processes, "start_child", lambda module, text, pass_fds: child)
    monkeypatch.setattr(processes, "process_vitals", lambda pid: ("R", share * child.now_s * processes._TICKS_PER_S))
    monkeypatch.setattr(time, "monotonic", lambda: child.now_s)
    ChildRanks("module", [b""]).wait(timeout_s=10.0)
    assert (round(child.now_s), child.is_killed) == (ends_s, is_killed)
