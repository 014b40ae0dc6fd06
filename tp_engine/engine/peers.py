"""The processes of the other ranks, each held by its handle: its end is seen, and a signal can not hit another."""

from __future__ import annotations

from collections.abc import Iterable

from tp_engine.engine.process_handle import ProcessHandle
from tp_engine.ipc.job_board import JobBoard, State


class Peers:
    """The ranks other than ``rank``, as they register on the board, or earlier where they are children (``adopt``)."""

    def __init__(self, board: JobBoard, rank: int) -> None:
        self._others = [slot for slot in board.slots if slot.rank != rank]
        self._handles: dict[int, ProcessHandle] = {}
        self._gone: dict[int, None] = {}  # a set in the order of the ends

    def adopt(self, rank: int, pid: int) -> None:
        """A child that this process has just started, and not yet waited for."""
        self._handles[rank] = ProcessHandle(pid)

    def refresh(self) -> list[int]:
        """Find the ranks that have registered since; returns the descriptors to poll."""
        for slot in self._others:
            if slot.pid and slot.rank not in self._handles and slot.rank not in self._gone:
                try:
                    self._handles[slot.rank] = ProcessHandle(slot.pid, slot.started_ticks)
                except ProcessLookupError:
                    self._gone[slot.rank] = None
        living = [handle for rank, handle in self._handles.items() if rank not in self._gone]
        return [handle.descriptor for handle in living if handle.descriptor is not None]

    def gone(self) -> list[int]:
        """The ranks whose process has ended, first the one that was noticed first."""
        for rank, handle in self._handles.items():
            if rank not in self._gone and handle.has_ended():
                self._gone[rank] = None
        return list(self._gone)

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL for those that are still there, also where they are stopped."""
        for rank in ranks:
            if rank in self._handles and rank not in self._gone:
                self._handles[rank].kill()

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
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
