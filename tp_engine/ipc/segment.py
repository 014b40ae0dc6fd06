"""A POSIX shared-memory segment with a random name, really reserved, and mapped.

``multiprocessing.shared_memory`` is not used: its resource tracker unlinks segments that other processes still need,
and it does not reserve their pages, so that a full /dev/shm kills the process with SIGBUS at some later write.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

SHM_FOLDER = Path("/dev/shm")
NAME_PREFIX = "tp_engine-"


def create_segment(num_bytes: int) -> tuple[str, mmap.mmap]:
    """A new segment of zeros, readable by this user only: (name, mapping).

    Raises ``RuntimeError`` with the needed and the available bytes where /dev/shm is too small; no name is left then.
    """
    name = NAME_PREFIX + secrets.token_hex(16)
    descriptor = os.open(SHM_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return name, mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        available = os.fstatvfs(descriptor)
        unlink_segment(name)
        if error.errno != errno.ENOSPC:
            raise
        raise RuntimeError(
            f"{SHM_FOLDER} is too small: the ranks' shared memory needs {num_bytes} bytes and "
            f"{available.f_bavail * available.f_frsize} are available; enlarge it (docker run --shm-size=64m) "
            f"or free some"
        ) from error
    finally:
        os.close(descriptor)


def open_segment(name: str) -> mmap.mmap:
    """Map a segment that another process created; ``FileNotFoundError`` if its name is gone."""
    descriptor = os.open(SHM_FOLDER / name, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def unlink_segment(name: str) -> None:
    """Remove the name; the memory lives on until the last process unmaps it.  Harmless if the name is gone."""
    with suppress(FileNotFoundError):
        os.unlink(SHM_FOLDER / name)
