"""Finds the masks of many sequences in threads, beside the scheduler; the library releases the GIL meanwhile.

::

    ask ----> first queue: masks of grammars that have been quick so far; some threads ------> place.mask, on_found
      |                        |
      |                        +--more than 2 ms: it is late.  Its thread gets a lower priority and ends after it, and
      |                           another one takes its place
      +-----> second queue: those of other grammars; few threads, of lower priority

Nobody has to wait for a mask, but a step that begins a moment later has more rows: ``be_patient`` waits for those of
the first queue that are not late.  So a slow grammar costs others a few milliseconds in all, however slow it is.  A
mask that takes 0.2 s of processor time is given up, with its grammar; its thread ends when the library reaches its own
limits.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tp_engine.grammar.matcher import GrammarMatcher, GrammarPlace
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

# Processor time of one mask.
_LATE_S = 0.002
_MOST_MASK_S = 0.2
# How long ``be_patient`` waits: for one mask, and for each that is asked for together with it.
_PATIENCE_S = 0.001
_PATIENCE_EACH_S = 0.0001

_LOOK_S = 0.02
_LINGER_S = 0.5  # of a thread without work
_MOST_THREADS = 64  # at most a few of which are busy with masks that somebody waits for
_NUM_FIRST = 4
_SHARE_S = 0.001  # of work for one thread
_LEAST_S = 0.00003  # of an unknown grammar's mask
_LATE_NICENESS = 10
_LOST_NICENESS = 19


class MaskFiller:
    """The queues and their threads.  ``on_found`` is called, in any thread, when a mask has come, or never will.

    Any thread may call the methods."""

    def __init__(self, on_found: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.RLock()
        self.num_threads = 0
        self._found = threading.Condition(self.lock)
        self._on_found = on_found
        self._first = _Lane(self, num_threads=_NUM_FIRST, niceness=0)
        self._second = _Lane(self, num_threads=max(1, min(4, _num_cores() // 2)), niceness=_LATE_NICENESS)
        self._asked: dict[GrammarPlace, _Fill] = {}  # until it is found, or given up
        self._running: set[_FillThread] = set()
        self._num_awaited = self._num_waiting = 0
        self._until_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether any mask is being found."""
        return bool(self._asked)

    def ask(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Begin to find the masks of the places of ``matchers``, unless that has begun; a matcher that nobody holds any
        more is forgotten."""
        with self.lock:
            quick, slow = list[_Fill](), list[_Fill]()
            for matcher in matchers:
                if not matcher.is_ready and matcher.place not in self._asked:
                    fill = self._asked[matcher.place] = _Fill(matcher)
                    (quick if fill.is_awaited else slow).append(fill)
            if quick:
                self._num_awaited += len(quick)
                self._until_s = time.monotonic() + _PATIENCE_S + _PATIENCE_EACH_S * self._num_awaited
                self._first.add(quick)
            if slow:
                self._second.add(slow)

    def be_patient(self) -> None:
        """Wait a moment for the masks that are nearly always quick."""
        with self.lock:
            self._watch()
            while self._num_awaited and (left_s := self._until_s - time.monotonic()) > 0:
                self._found.wait(min(left_s, _LATE_S))
                self._watch()

    def wait(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Wait for the masks of ``matchers``."""
        with self.lock:
            self._num_waiting += 1
            try:
                while not all(one.is_ready for one in matchers):
                    self.ask(matchers)  # if one fails, the next round asks for the others of its place
                    self._found.wait(_LOOK_S)
                    self._watch()
            finally:
                self._num_waiting -= 1

    def close(self) -> None:
        """Forget what was asked for; threads end after their current masks, without being waited for."""
        with self.lock:
            for lane in (self._first, self._second):
                lane.close()
            self._asked.clear()
            self._num_awaited = 0

    def next_of(self, lane: _Lane, thread: _FillThread) -> GrammarMatcher | None:
        """What the thread does next; waits for it.  None if it is to end."""
        with self.lock:
            while (fill := lane.take(thread)) is not None:
                matcher = fill.matcher()
                if matcher is not None and not matcher.is_ready:
                    thread.fill, thread.began_s = fill, time.thread_time()
                    self._running.add(thread)
                    return matcher
                self._forget(fill)
            return None

    def done(self, thread: _FillThread) -> None:
        """Note that the thread has found its mask, or has failed."""
        with self.lock:
            self._running.discard(thread)
            fill, thread.fill = thread.fill, None
            if fill is not None:
                self._forget(fill)

    def _forget(self, fill: _Fill) -> None:
        if self._asked.get(fill.place) is fill:
            del self._asked[fill.place]
            self._await_no_more(fill)
            self._on_found()
            if self._num_waiting:
                self._found.notify_all()

    def _await_no_more(self, fill: _Fill) -> None:
        if fill.is_awaited:
            fill.is_awaited = False
            self._num_awaited -= 1
            if not self._num_awaited:
                self._found.notify_all()

    def _watch(self) -> None:
        """Note which masks are late, and give up those that take too long."""
        for thread in list(self._running):
            fill, spent_s = thread.fill, thread.spent_s()
            if fill is None or spent_s < _LATE_S:
                continue
            self._await_no_more(fill)
            thread.lose(_LATE_NICENESS)
            matcher = fill.matcher()
            if spent_s > _MOST_MASK_S and matcher is not None:
                self._running.discard(thread)
                thread.fill = None
                thread.lose(_LOST_NICENESS)
                matcher.give_up()
                self._forget(fill)


class _Fill:
    """A mask to be found at ``place``, by ``matcher``, in about ``work_s``."""

    __slots__ = ("is_awaited", "matcher", "place", "work_s")

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.place = matcher.place
        self.matcher = weakref.ref(matcher)
        self.is_awaited = matcher.is_quick
        self.work_s = max(_LEAST_S, matcher.usual_s)


class _Lane:
    """A queue and its threads, as many as its work needs, at most ``num_threads``; callers hold the filler's lock."""

    def __init__(self, filler: MaskFiller, *, num_threads: int, niceness: int) -> None:
        self.niceness = niceness
        self._filler, self._most = filler, num_threads
        self._queue: deque[_Fill] = deque()
        self._work_s = 0.0
        self._news = threading.Condition(filler.lock)
        self._num_threads = self._num_idle = 0
        self._is_closed = False

    def add(self, fills: list[_Fill]) -> None:
        self._queue.extend(fills)
        self._work_s += sum(fill.work_s for fill in fills)
        self.staff()

    def staff(self) -> None:
        """Make sure that enough threads are at work."""
        num_wanted = min(self._most, len(self._queue), math.ceil(self._work_s / _SHARE_S))
        num_missing = num_wanted - self._num_threads + self._num_idle
        if num_missing <= 0 or self._is_closed:
            return
        self._news.notify(num_missing)
        for _ in range(min(num_missing - self._num_idle, _MOST_THREADS - self._filler.num_threads)):
            self._num_threads += 1
            self._filler.num_threads += 1
            _FillThread(self._filler, self).start()

    def take(self, thread: _FillThread) -> _Fill | None:
        """The next one; None if the thread is to end."""
        while not (self._is_closed or thread.is_lost):
            if self._queue:
                fill = self._queue.popleft()
                self._work_s = self._work_s - fill.work_s if self._queue else 0.0
                return fill
            self._num_idle += 1
            has_news = self._news.wait(_LINGER_S)
            self._num_idle -= 1
            if not (has_news or self._queue):
                break
        return None

    def count_out(self) -> None:
        """Note that a thread ends, or no longer belongs to this lane."""
        self._num_threads -= 1
        self.staff()

    def close(self) -> None:
        self._is_closed = True
        self._queue.clear()
        self._work_s = 0.0
        self._news.notify_all()


class _FillThread(threading.Thread):
    """Finds one mask after the other.  ``fill`` is the current one; ``began_s`` is the thread's clock at its start."""

    def __init__(self, filler: MaskFiller, lane: _Lane) -> None:
        super().__init__(name="token-masks")
        self.fill: _Fill | None = None
        self.began_s = 0.0
        self.is_lost = False  # to its lane
        self._filler, self._lane = filler, lane
        self._clock = self._niceness = 0

    def spent_s(self) -> float:
        """Processor time of the current mask; asked while there is one."""
        return time.clock_gettime(self._clock) - self.began_s

    def lose(self, niceness: int) -> None:
        """Lower its priority for its current mask, after which it ends; does nothing if it is that low already."""
        if niceness <= self._niceness:
            return
        self._be_nice(niceness)
        self._leave_lane()

    def run(self) -> None:
        """See ``threading.Thread``."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        if self._lane.niceness:
            self._be_nice(self._lane.niceness)
        while (matcher := self._filler.next_of(self._lane, self)) is not None:
            try:
                matcher.find_mask()
            except BaseException as error:  # even a panic of the library ends only the request
                logger.exception("a mask could not be found")
                matcher.fail(f"{type(error).__name__}: {error}")
            matcher = None
            self._filler.done(self)
        with self._filler.lock:
            self._filler.num_threads -= 1
            self._leave_lane()

    def _leave_lane(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._lane.count_out()

    def _be_nice(self, niceness: int) -> None:
        """Lower the priority; a thread cannot raise it again."""
        self._niceness = niceness
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, niceness)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
