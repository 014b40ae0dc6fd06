"""Other processes, held by handles: their end is seen, and a signal cannot reach a later process with the same pid.

Of the ranks of other hosts there are no handles: the board says when they have ended (``HostView``).

A pidfd does both.  Kernels before 5.3 and some sandboxes have no pidfds: there the start time identifies the process,
and a wait for its end looks twice a second.
"""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import State, process_start, process_vitals

_NO_PIDFD = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
_LOOK_S = 0.5
_LOOK_FOR_RANKS_S = 2.0


class ProcessHandle:
    """Process ``pid``, which started at ``started_ticks`` if given; ``ProcessLookupError`` if it has ended.
    ``descriptor`` is readable once the process has ended; None if the kernel has no pidfds."""

    def __init__(self, pid: int, started_ticks: int | None = None) -> None:
        self.pid = pid
        self.descriptor = _open(pid)
        try:
            self._started_ticks = process_start(pid)
            if started_ticks not in (None, self._started_ticks):
                raise ProcessLookupError(f"process {pid} is not the one that started at {started_ticks}")
        except ProcessLookupError:
            self.close()
            raise

    def has_ended(self) -> bool:
        """Return whether the process has ended; a zombie has."""
        if self.descriptor is not None:
            return self._await_end(0)
        try:
            return process_start(self.pid) != self._started_ticks or process_vitals(self.pid)[0] in "ZX"
        except ProcessLookupError:
            return True

    def wait(self) -> None:
        """Wait for the process to end."""
        if self.descriptor is not None:
            self._await_end(None)
        while not self.has_ended():
            time.sleep(_LOOK_S)

    def _await_end(self, timeout_ms: int | None) -> bool:
        """Whether the process ends within that time; not by ``select``, which takes no descriptor above 1023."""
        assert self.descriptor is not None
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; does nothing if it has ended."""
        try:
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.has_ended():
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _NO_PIDFD:
            raise
    return None


def living_ranks(marks: Mapping[str, str], processes: Path = Path("/proc")) -> set[int]:
    """``RANK`` of every process of this host that was started with the environment ``marks``."""
    wanted, found = {f"{name}={value}".encode() for name, value in marks.items()}, set()
    for file in processes.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            variables = file.read_bytes().split(b"\0")
            if wanted.issubset(variables):
                found |= {int(text[5:]) for text in variables if text.startswith(b"RANK=")}
    return found


class Peers:
    """The processes of the ranks other than ``rank``, once they register on the board, or once ``adopt`` names them.
    Only processes of this host are polled and killed.  ``marks``: the environment that the launcher gave to all ranks,
    if it started them: a rank that has not registered, and that no process of this host is, has ended."""

    def __init__(self, board: JobBoard, rank: int) -> None:
        self.marks: Mapping[str, str] = {}
        self._looked_s = time.monotonic()
        self._unseen: set[int] = set()
        self._others = [slot for slot in board.local_slots if slot.rank != rank]
        self._far = board.far_slots
        self._handles: dict[int, ProcessHandle] = {}
        self._gone: dict[int, None] = {}  # a set in the order of the ends

    def adopt(self, rank: int, pid: int) -> None:
        """Hold a child that this process has just started and not yet waited for."""
        self._handles[rank] = ProcessHandle(pid)

    def refresh(self) -> list[int]:
        """Hold the ranks that have registered since the last call; returns the descriptors to poll."""
        for slot in self._others:
            if slot.pid and slot.rank not in self._handles and slot.rank not in self._gone:
                try:
                    self._handles[slot.rank] = ProcessHandle(slot.pid, slot.started_ticks)
                except ProcessLookupError:
                    self._gone[slot.rank] = None
        living = [handle for rank, handle in self._handles.items() if rank not in self._gone]
        return [handle.descriptor for handle in living if handle.descriptor is not None]

    def gone(self) -> list[int]:
        """Return the ranks whose process has ended, in the order in which that was noticed."""
        for rank, handle in self._handles.items():
            if rank not in self._gone and handle.has_ended():
                self._gone[rank] = None
        for slot in self._far:
            if slot.rank not in self._gone and slot.host.ended:
                self._gone[slot.rank] = None
        for rank in self._never_came():
            self._gone.setdefault(rank)
        return list(self._gone)

    def _never_came(self) -> set[int]:
        """The launched ranks that have ended without coming to the board, seen twice because a process takes a moment
        to begin."""
        absent = {slot.rank for slot in self._others if slot.pid == 0}
        now_s = time.monotonic()
        if not self.marks or not absent or now_s < self._looked_s + _LOOK_FOR_RANKS_S:
            return set()
        self._looked_s = now_s
        unseen, self._unseen = self._unseen, absent - living_ranks(self.marks)
        return {slot.rank for slot in self._others if slot.pid == 0 and slot.rank in unseen & self._unseen}

    def kill(self, ranks: Iterable[int]) -> None:
        """Send SIGKILL to those of ``ranks`` that still run, stopped ones included."""
        for rank in ranks:
            if rank in self._handles and rank not in self._gone:
                self._handles[rank].kill()

    def kill_all(self) -> None:
        """Send SIGKILL to every other rank that has not left."""
        self.kill(slot.rank for slot in self._others if slot.state != State.LEFT)

    def missing(self) -> list[int]:
        """Return the ranks that have neither left, nor failed, nor ended."""
        gone = self.gone()
        final = (State.LEFT, State.FAILED)
        everyone = (*self._others, *self._far)
        return sorted(slot.rank for slot in everyone if slot.rank not in gone and slot.state not in final)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
