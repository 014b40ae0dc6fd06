"""Process-shared POSIX semaphores that live inside a shared-memory segment.

``sem_post`` and a successful wait synchronise memory between processes (POSIX.1-2017, 4.12), on every architecture:
what a process wrote before its post is seen by the process whose wait that post satisfied.  Plain bytes in shared
memory do not give that guarantee.  A waiter is blocked in the kernel and costs no CPU.
"""

import ctypes
import errno
import mmap
import os
import time

from tp_engine.system.cpus import num_cpus

SEMAPHORE_BYTES = 64
"""Room for one ``sem_t`` (32 bytes on 64-bit Linux), in a cache line of its own."""

_SPIN_S = 20e-6

# PyDLL holds the GIL in calls that never block, at a tenth of the cost; CDLL releases it in the call that blocks.
_quick = ctypes.PyDLL(None, use_errno=True)
_blocking = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_quick.sem_post.argtypes = [ctypes.c_void_p]
_quick.sem_trywait.argtypes = [ctypes.c_void_p]
_blocking.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
if _HAS_CLOCKWAIT := hasattr(_blocking, "sem_clockwait"):
    _blocking.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]


def functions() -> dict[str, int]:
    """Return the addresses of the C library's functions on semaphores, by name, for compiled code; 0 for one that it
    lacks.  Each glibc says by other versions where they are, so compiled code that names them loads on few."""
    names = ("sem_post", "sem_trywait", "sem_timedwait", "sem_clockwait")
    return {
        name: ctypes.cast(getattr(_blocking, name), ctypes.c_void_p).value or 0 if hasattr(_blocking, name) else 0
        for name in names
    }


def default_spin_s(num_ranks: int) -> float:
    """Return how long a wait spins before it blocks: 20 microseconds, or 0 if there are fewer cores than ranks."""
    return _SPIN_S if num_cpus() >= num_ranks else 0.0


def _fail(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


class Semaphore:
    """The semaphore at ``offset`` (a multiple of 64) of ``memory``; unusable once ``memory`` is closed."""

    __slots__ = ("_address",)

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        assert offset % SEMAPHORE_BYTES == 0, f"offset {offset} is not aligned to {SEMAPHORE_BYTES} bytes"
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))

    def initialise(self, value: int) -> None:
        """Set the initial ``value``; the creator calls this once, before another process maps the segment."""
        if _quick.sem_init(self._address, 1, value) != 0:
            raise _fail("sem_init")

    def post(self) -> None:
        """Add one, and wake a waiter."""
        if _quick.sem_post(self._address) != 0:
            raise _fail("sem_post")

    def try_wait(self) -> bool:
        """Take one if the value is positive; never blocks."""
        while _quick.sem_trywait(self._address) != 0:
            if (code := ctypes.get_errno()) == errno.EAGAIN:
                return False
            if code != errno.EINTR:
                raise _fail("sem_trywait")
        return True

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Take one; False if none came within ``timeout_s``.  Spins for ``spin_s`` at most, then blocks.  A signal does
        not shorten the wait, but its Python handler runs at once and may raise."""
        if self.try_wait():
            return True
        now = time.monotonic()
        deadline = now + timeout_s
        spin_until = now + min(spin_s, timeout_s)
        try_wait, address = _quick.sem_trywait, self._address
        while time.monotonic() < spin_until:
            if try_wait(address) == 0:
                return True
        return self._block(deadline)

    def _block(self, deadline: float) -> bool:
        """Block until ``deadline`` (time.monotonic() seconds); ``sem_timedwait`` uses the wall clock."""
        if not _HAS_CLOCKWAIT:
            deadline += time.time() - time.monotonic()
        until = _Timespec(int(deadline), int(deadline % 1.0 * 1e9))
        while self._wait_until(until) != 0:
            if (code := ctypes.get_errno()) == errno.ETIMEDOUT:
                return False
            if code != errno.EINTR:
                raise _fail("sem_clockwait" if _HAS_CLOCKWAIT else "sem_timedwait")
        return True

    def _wait_until(self, until: _Timespec) -> int:
        if _HAS_CLOCKWAIT:
            status = _blocking.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        else:
            status = _blocking.sem_timedwait(self._address, ctypes.byref(until))
        return int(status)
