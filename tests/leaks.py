"""Check that a test leaves nothing behind on this machine.

Names ``tp_engine-*`` in /dev/shm and child processes are compared before and after.  Both get a few seconds, because a
process needs a moment to end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 30.0
POLL_S = 0.02
SEGMENT_PREFIX = "tp_engine-"
SHM = Path("/dev/shm")
ISOLATED = "tp_engine.system.isolation.host"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Names of shared-memory segments, and the identifiers of all processes of this machine, whosever they are: a list
    of them costs a twentieth of a search for the children; only of new ones the parents are looked up."""

    segments: frozenset[str]
    processes: frozenset[int]


def footprint() -> Footprint:
    """The footprint now."""
    segments = frozenset(path.name for path in SHM.glob(SEGMENT_PREFIX + "*"))
    return Footprint(segments, frozenset(psutil.pids()))


def leaked_since(before: Footprint, grace_s: float = GRACE_S, *, engines_go_on: bool = False) -> list[str]:
    """A line for each process or name that is new since ``before`` and still exists after ``grace_s`` seconds.

    If ``engines_go_on``, fixtures of a wider scope may have engines, whose first grammar starts a process.
    """
    deadline = time.monotonic() + grace_s
    while leaks := _new_segments(before) + _new_children(before, spared=ISOLATED if engines_go_on else None):
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return leaks


def _new_segments(before: Footprint) -> list[str]:
    new = {path.name for path in SHM.glob(SEGMENT_PREFIX + "*")} - before.segments
    return [f"shared memory /dev/shm/{name}" for name in sorted(new) if not _belongs_to_another_job(name)]


def _belongs_to_another_job(segment: str) -> bool:
    """Whether a living process outside this test's process tree has the segment mapped."""
    this = psutil.Process()
    ours = {this.pid, *(child.pid for child in this.children(recursive=True))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in ours:
            continue
        with suppress(OSError):
            if segment in maps.read_text():
                return True
    return False


def _new_children(before: Footprint, spared: str | None) -> list[str]:
    """A line for each new process that descends from this one; others' processes come and go on a shared machine."""
    leaks = []
    for identifier in sorted(frozenset(psutil.pids()) - before.processes):
        with suppress(psutil.NoSuchProcess, OSError):
            if os.getpid() not in _ancestors(identifier):
                continue
            child = psutil.Process(identifier)
            command = " ".join(child.cmdline())
            if spared is not None and command.endswith(spared):
                continue
            if child.status() != psutil.STATUS_ZOMBIE and not _is_of_multiprocessing(child, command):
                leaks.append(f"process {child.pid}: {command}")
    return leaks


def _ancestors(process: int) -> Iterator[int]:
    """The process's parent, its parent's parent and so on, in a tenth of the time of ``psutil.Process.parents``."""
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        yield process


def _is_of_multiprocessing(child: psutil.Process, command: str) -> bool:
    """Whether it lives as long as this process does: the resource tracker, or the server that forks warm ranks."""
    is_fork_server = "multiprocessing.forkserver" in command and child.ppid() == os.getpid()
    return "resource_tracker" in command or is_fork_server
