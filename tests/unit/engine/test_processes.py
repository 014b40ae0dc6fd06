"""Processes that must not outlive the process that started them.  Oracle: the kernel's own table of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 20.0

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
