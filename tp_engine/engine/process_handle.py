"""Another process, held so that its end is seen and a signal can not hit a stranger that got its number.

A pidfd does both.  Kernels before 5.3 and some sandboxes have none: there the start time tells a process from the next
one with its number, and whoever waits for an end looks twice a second.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time

from tp_engine.ipc.job_board import process_start, process_vitals

_NO_PIDFD = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
_LOOK_S = 0.5


class ProcessHandle:
    """``pid``, which started at ``started_ticks`` if that is known; ``ProcessLookupError`` if that one has ended.

    ``descriptor``: readable once it has ended; None where the kernel has no pidfds.
    """

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
        """Whether it has; a zombie has."""
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], 0.0)[0])
        try:
            return process_start(self.pid) != self._started_ticks or process_vitals(self.pid)[0] in "ZX"
        except ProcessLookupError:
            return True

    def wait(self) -> None:
        """Return when it has ended."""
        if self.descriptor is not None:
            select.select([self.descriptor], [], [])
        while not self.has_ended():
            time.sleep(_LOOK_S)

    def kill(self) -> None:
        """SIGKILL, also for one that is stopped; nothing happens if it has ended."""
        try:
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.has_ended():
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Let go of it."""
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
