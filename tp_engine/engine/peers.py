"""The processes of the other ranks, each held by a pidfd: its end is seen at once, and a signal can not hit another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable

from tp_engine.ipc.job_board import JobBoard, State, process_start


class Peers:
    """The ranks other than ``rank``, as they register on the board, or earlier where they are children (``adopt``)."""

    def __init__(self, board: JobBoard, rank: int) -> None:
        self._others = [slot for slot in board.slots if slot.rank != rank]
        self._descriptors: dict[int, int] = {}
        self._gone: dict[int, None] = {}  # a set in the order of the ends

    def adopt(self, rank: int, pid: int) -> None:
        """A child that this process has just started, and not yet waited for."""
        self._descriptors[rank] = os.pidfd_open(pid)

    def refresh(self) -> list[int]:
        """Find the ranks that have registered since; returns the descriptors to poll."""
        for slot in self._others:
            if slot.pid and slot.rank not in self._descriptors and slot.rank not in self._gone:
                self._open(slot.rank, slot.pid, slot.started_ticks)
        return [descriptor for rank, descriptor in self._descriptors.items() if rank not in self._gone]

    def gone(self) -> list[int]:
        """The ranks whose process has ended, first the one that was noticed first."""
        for rank, descriptor in self._descriptors.items():
            if rank not in self._gone and select.select([descriptor], [], [], 0.0)[0]:
                self._gone[rank] = None
        return list(self._gone)

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL for those that are still there, also where they are stopped."""
        for rank in ranks:
            if rank in self._descriptors and rank not in self._gone:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptors[rank], signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL for every other rank that has not left."""
        self.kill(slot.rank for slot in self._others if slot.state != State.LEFT)

    def missing(self) -> list[int]:
        """The ranks that have neither left nor ended in another way."""
        gone = self.gone()
        final = (State.LEFT, State.FAILED)
        return [slot.rank for slot in self._others if slot.rank not in gone and slot.state not in final]

    def close(self) -> None:
        """Let go of the processes."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _open(self, rank: int, pid: int, started_ticks: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone[rank] = None
            return
        self._descriptors[rank] = descriptor
        try:
            is_same = process_start(pid) == started_ticks
        except ProcessLookupError:
            is_same = False
        if not is_same:  # it ended, and another process has its number
            os.close(self._descriptors.pop(rank))
            self._gone[rank] = None
