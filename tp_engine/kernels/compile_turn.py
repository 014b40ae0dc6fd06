"""Whose turn it is to compile: of several processes that want one file, one compiles, and the others follow it.

::

    <file>.lock      locked (flock) by the process that compiles; holds its pid, host, start time and progress
    <file>.lock-2    the same, in case the first process hangs

The operating system drops a lock with its process, however that ends.  A process that lives but makes no progress for
``STALL_S`` is named in the log, and the next one compiles beside it.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tp_engine.job.progress import tell_progress
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

STALL_S = 150.0  # each file or kernel counts as progress; one takes some seconds on an idle machine
_LOOK_S = 0.05
_SAY_S = 10.0


class Turn:
    """The right to compile; ``report`` tells the others how far this process is."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}"
        self.report("has begun")

    def report(self, progress: str) -> None:
        """Write ``progress``, such as ``3 of 17 files``, for those who wait."""
        text = f"{self._who}, {progress}".encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))


@contextlib.contextmanager
def take_turn(file: Path, is_there: Callable[[], bool], *, what: str) -> Iterator[Turn | None]:
    """Wait for the turn to compile ``file``; None if ``is_there()`` first, or if two processes before this one hang.

    Whoever has the turn looks again whether the file is there.  Where the file system has no locks, everybody has a
    turn.  ``what`` names the file in the log.
    """
    for path in (Path(f"{file}.lock"), Path(f"{file}.lock-2")):
        descriptor = _wait(path, is_there, what)
        if descriptor is None:
            if is_there():
                break
            continue
        try:
            yield Turn(descriptor)
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        return
    yield None


def _wait(path: Path, is_there: Callable[[], bool], what: str) -> int | None:
    """The locked lock file; None once ``is_there()``, or if the holder of the lock makes no progress."""
    seen, seen_s, said_s = "", time.monotonic(), 0.0
    while (descriptor := _try(path)) is None:
        if is_there():
            return None
        holder, now_s = _read(path), time.monotonic()
        if holder != seen:
            seen, seen_s = holder, now_s
        if now_s > seen_s + STALL_S:
            logger.warning(
                "not waiting any longer for %s, made by %s, without progress for %g s; end that process if it hangs",
                what,
                seen or "another process",
                STALL_S,
            )
            return None
        if seen and now_s > said_s + _SAY_S:
            said_s = now_s
            logger.info("waiting for %s, made by %s", what, seen)
            tell_progress(f"waiting for another process, which makes {what}: {seen.rpartition(', ')[2]}")
        time.sleep(_LOOK_S)
    return descriptor


def _try(path: Path) -> int | None:
    """The file, locked by this process; None while another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        return descriptor
    with contextlib.suppress(FileNotFoundError):
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    os.close(descriptor)  # its last holder has removed it
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
