"""A shared-memory segment without a name: its pages are reserved, and freed when the last process that maps it ends.

It is an anonymous file in /dev/shm; other processes of the same user open it through its creator, as /proc/PID/fd/FD.
It needs no name in any folder, so nothing is left behind when a process is killed at any moment.

``multiprocessing.shared_memory`` is not used: it names its segments, its resource tracker unlinks those that other
processes still need, and it does not reserve their pages, so that a full /dev/shm kills the process with SIGBUS at some
later write.
"""

import errno
import mmap
import os
from pathlib import Path

from tp_engine.system.units import MIB

SHM_FOLDER = Path("/dev/shm")
_LEAST_BYTES = 16 * MIB  # plans, and on CPUs tensors
_NCCL_BYTES = 10 * MIB  # of each pair of GPUs that do not read each other's memory

_NO_ANONYMOUS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class Segment:
    """Shared ``memory``; with the ``descriptor`` of its file, which the creator alone has, others find it at
    ``address`` until ``stop_sharing``."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        self.memory, self._descriptor = memory, descriptor

    @property
    def address(self) -> str:
        """Where other processes of the host find it."""
        assert self._descriptor >= 0, "only its creator shares this memory"
        return f"{os.getpid()}:{self._descriptor}:{os.fstat(self._descriptor).st_ino}"

    def stop_sharing(self) -> None:
        """Let no further process map it; existing mappings stay.  Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def needed_bytes(num_ranks: int, *, has_gpus: bool = True) -> int:
    """Bytes of /dev/shm that suffice for ``num_ranks`` ranks of a host, with what NCCL may take for GPUs."""
    return _LEAST_BYTES + has_gpus * _NCCL_BYTES * num_ranks * (num_ranks - 1)


def shm_option(num_ranks: int) -> str:
    """docker's option for a container of ``num_ranks`` ranks, in whole powers of two, such as ``--shm-size=1024m``."""
    return f"--shm-size={max(64, 1 << (needed_bytes(num_ranks) // MIB).bit_length())}m"


def create_segment(num_bytes: int, *, num_ranks: int = 1) -> tuple[mmap.mmap, int]:
    """Return a new segment of zeros and its descriptor, for processes of this user only; ``num_ranks`` will share it.
    ``RuntimeError``, with the needed and the available bytes, if /dev/shm is too small."""
    descriptor = _anonymous_file()
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return _map(descriptor, num_bytes), descriptor
    except OSError as error:
        available = os.fstatvfs(descriptor)
        os.close(descriptor)
        if error.errno != errno.ENOSPC:
            raise
        raise RuntimeError(
            f"{SHM_FOLDER} is too small: the ranks' shared memory needs {num_bytes} bytes and "
            f"{available.f_bavail * available.f_frsize} are available; enlarge it (docker run "
            f"{shm_option(num_ranks)}) or free some"
        ) from error


def open_segment(address: str) -> mmap.mmap:
    """Map another process's segment; ``FileNotFoundError`` if that process has ended or stopped sharing it."""
    pid, descriptor, inode = address.split(":")
    path = f"/proc/{pid}/fd/{descriptor}"
    # The descriptor may belong to another file by now, and opening a pipe, for example, could block.
    if os.stat(path).st_ino != int(inode):
        raise FileNotFoundError(errno.ENOENT, "the segment is no longer shared", path)
    mine = os.open(path, os.O_RDWR)
    try:
        return _map(mine, 0)
    finally:
        os.close(mine)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map all pages now; otherwise the first access to each page would cost a fault during a step."""
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _anonymous_file() -> int:
    try:
        return os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _NO_ANONYMOUS_FILES:
            raise
    return os.memfd_create("tp_engine", os.MFD_CLOEXEC)  # on a kernel or container without O_TMPFILE in /dev/shm
