"""How the threads of a rank on CPUs wait for each other: spinning while each has a core, asleep beside busy programs.

A step is hundreds of parallel parts, and between them the threads of OpenMP spin, for milliseconds by default, as a
thread that sleeps takes longer to wake than a small part takes.  Where another program needs the cores, that is
ruinous: those that wait hold the cores that the one they wait for would run on.  Environment variables
(``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT``) decide once for a process, before it is known which of the two will be.

GNU's OpenMP, which torch brings, asks at each wait how many threads it has: more than there are processors, and it
spins for 100 rounds instead of 300,000 (``gomp_throttled_spin_count_var`` in libgomp's ``wait.h``).  So a team of idle
threads beside the real one switches spinning off, and its end switches it on again.  Other OpenMP libraries are left as
they are.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from tp_engine.system import env
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)

# Shares of the time that threads were running or ready in which they had no core.
_BUSY, _QUIET = 0.15, 0.03
# A period says nothing unless threads wanted to run for so long; after so many quiet ones spinning is tried again.
PERIOD_S, _LEAST_S, _QUIET_PERIODS = 0.5, 0.02, 10
_SPARE_THREADS = 16  # that others of the process or its container may start meanwhile


class CoreTime(NamedTuple):
    """Seconds that a thread ran, and that it was ready and had no core."""

    ran: float
    waited: float


class Closeable(Protocol):
    """What switches spinning off from when it is made until it is closed."""

    def close(self) -> None: ...


class Waiting:
    """How the threads wait: ``note`` what each has had so far (by thread, cumulative) and it changes between spinning
    and sleeping, which ``make_team`` makes them do; if that returns None, they spin from then on."""

    def __init__(self, make_team: Callable[[], Closeable | None]) -> None:
        self._make_team: Callable[[], Closeable | None] | None = make_team
        self._team: Closeable | None = None
        self._last: dict[int, CoreTime] = {}
        self._num_quiet, self._has_told = 0, False

    @property
    def is_asleep(self) -> bool:
        """Whether threads that wait go to sleep at once."""
        return self._team is not None

    def note(self, threads: dict[int, CoreTime]) -> None:
        """Judge the period since the last call."""
        both = threads.keys() & self._last.keys()
        ran = sum(threads[one].ran - self._last[one].ran for one in both)
        waited = sum(threads[one].waited - self._last[one].waited for one in both)
        self._last = threads
        if ran + waited < _LEAST_S:
            return
        share = waited / (ran + waited)
        self._num_quiet = self._num_quiet + 1 if share < _QUIET else 0
        if self._team is None and share > _BUSY:
            self._sleep(share)
        elif self._team is not None and self._num_quiet >= _QUIET_PERIODS:
            self.close()

    def close(self) -> None:
        """Let threads spin again."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def _sleep(self, share: float) -> None:
        if self._make_team is None:
            return
        self._team = self._make_team()
        if self._team is None:
            self._make_team = None
            _logger.warning(
                "the cores are busy, and no idle threads can be made, so threads go on spinning while they "
                "wait for each other; start with GOMP_SPINCOUNT=1000 if tokens take long"
            )
        elif not self._has_told:
            self._has_told = True
            _logger.info(
                "the cores are busy (threads lacked one for %.0f %% of the time): as long as that lasts, those "
                "that wait for each other sleep instead of spinning",
                100 * share,
            )


class IdleTeam:
    """A team of so many idle threads that the process has more than there are processors, from ``make`` to ``close``.

    A thread's team lives as long as the thread; the function that all of its threads call does nothing.
    """

    def __init__(self, num_threads: int) -> None:
        self._is_made, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(num_threads,), name="idle-team", daemon=True)
        self._thread.start()
        self._is_made.wait()

    @classmethod
    def make(cls) -> IdleTeam | None:
        """None if the process may not have so many threads, for which libgomp would end it, or if libgomp makes fewer
        (``OMP_DYNAMIC``, ``OMP_THREAD_LIMIT``)."""
        openmp = ctypes.CDLL(None)
        missing = max(0, openmp.omp_get_num_procs() - torch.get_num_threads() + 1)  # beside the team that computes
        is_allowed = not openmp.omp_get_dynamic() and openmp.omp_get_thread_limit() > missing
        return cls(missing + 1) if is_allowed and _may_start(missing + _SPARE_THREADS) else None

    def _hold(self, num_threads: int) -> None:
        openmp = ctypes.CDLL(None)
        nothing = ctypes.cast(openmp.omp_get_thread_num, ctypes.c_void_p)
        openmp.GOMP_parallel(nothing, None, ctypes.c_uint(num_threads), ctypes.c_uint(0))
        self._is_made.set()
        self._end.wait()

    def close(self) -> None:
        """End the team; the process has the threads that it had before."""
        self._end.set()
        self._thread.join()


def _may_start(number: int) -> bool:
    """Whether ``number`` threads more can live now, by starting them."""
    end, started = threading.Event(), []
    try:
        for _ in range(number):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # can't start new thread
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


def can_sleep() -> bool:
    """Whether this process computes with several threads of GNU's OpenMP, and nobody has said how they are to wait."""
    is_decided = env.OMP_WAIT_POLICY.read() or env.GOMP_SPINCOUNT.read()
    openmp = ctypes.CDLL(None)  # Intel's and LLVM's have GNU's names too, and their own
    is_gnu = hasattr(openmp, "GOMP_parallel") and not hasattr(openmp, "kmp_set_blocktime")
    return not is_decided and torch.get_num_threads() > 1 and is_gnu


def thread_times() -> dict[int, CoreTime]:
    """What each thread of this process has had, by Linux's ``schedstat``; empty where the kernel does not count it."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                ran, waited, _ = file.read().split()
        except OSError:  # it has ended, or the kernel does not count
            continue
        found[int(thread)] = CoreTime(int(ran) / 1e9, int(waited) / 1e9)
    return found


@contextmanager
def watched_waiting() -> Iterator[None]:
    """Watch the threads of this process, and let them wait as ``Waiting`` judges, until the block ends."""
    if not can_sleep():
        yield
        return
    waiting, end = Waiting(IdleTeam.make), threading.Event()

    def watch() -> None:
        while not end.wait(PERIOD_S):
            waiting.note(thread_times())

    thread = threading.Thread(target=watch, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        waiting.close()
