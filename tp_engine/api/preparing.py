"""The threads in which requests are prepared: read, put into a template, tokenized.

::

    small requests    one thread, so that none waits for long
    large ones        two: long texts wait for each other
    with images       four: files are fetched and decoded, and nobody else waits for that
    with forced calls two: another process reads the schemas of tools, which may take it seconds
    large bodies      one: the parser of JSON keeps the GIL, so it pauses after each as long as that took

Who waits has a place by the time it came, and later by its size: a small request passes larger ones.  What a thread
does for a task that is cancelled ends soon if it is an isolated call (``isolation/``), and its result is dropped.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tp_engine.heap import HeapTrimmer
from tp_engine.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.panics import panics_refused
from tp_engine.units import KIB

LARGE = 64 * KIB
_NUM_LARGE_THREADS = 2
_NUM_IMAGE_THREADS = 4
_NUM_SCHEMA_THREADS = 2
_S_PER_UNIT = 1e-4  # of a request's size; tokenizing takes about a hundredth of that
_LONGEST_PAUSE_S = 1.0
_HEAP_PER_UNIT = 200  # bytes that tokenizing takes for a while

Result = TypeVar("Result")


class PreparingThreads:
    """For the tasks of one event loop."""

    def __init__(self) -> None:
        self._small = _Line("preparing", 1)
        self._large = _Line("preparing-large", _NUM_LARGE_THREADS)
        self._images = _Line("preparing-images", _NUM_IMAGE_THREADS)
        self._schemas = _Line("preparing-schemas", _NUM_SCHEMA_THREADS)
        self._bodies = _Line("parsing", 1)
        self._trimmer = HeapTrimmer()
        self._began_s: float | None = None
        self._pauses_until_s = 0.0

    async def run(
        self,
        size: int,
        function: Callable[..., Result],
        *arguments: Any,
        has_images: bool = False,
        forces_calls: bool = False,
        **named: Any,
    ) -> Result:
        """Call ``function`` for a request of ``size`` bytes or characters; not if cancelled before its turn."""
        work = partial(_call, partial(function, *arguments, **named))
        if has_images:
            return await self._images.run(size, work)
        if forces_calls:
            return await self._schemas.run(size, work)
        if size > LARGE:
            try:
                return await self._large.run(size, work)
            finally:
                self._trimmer.note_freed(size * _HEAP_PER_UNIT)
        return await self._small.run(size, partial(self._timed, work))

    async def parse(self, size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Do as ``run``, for a function that keeps the GIL and a large body of ``size`` bytes."""
        return await self._bodies.run(size, partial(self._paused, partial(_call, partial(function, *arguments))))

    def busy_s(self) -> float:
        """Return how long the small request that is prepared now has taken; 0 if none is."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def close(self) -> None:
        """End the threads after what they do now, without waiting for them."""
        for line in (self._small, self._large, self._images, self._schemas, self._bodies):
            line.threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], Result]) -> Result:
        self._began_s = time.monotonic()
        try:
            return work()
        finally:
            self._began_s = None

    def _paused(self, work: Callable[[], Result]) -> Result:
        time.sleep(max(0.0, self._pauses_until_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            return work()
        finally:
            ended_s = time.monotonic()
            self._pauses_until_s = ended_s + min(ended_s - began_s, _LONGEST_PAUSE_S)


def _call(work: Callable[[], Result]) -> Result:
    with panics_refused("the request can not be prepared"):
        return work()


class _Line:
    """Some threads, and those who wait for one."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        if self._num_free:
            self._num_free -= 1
        else:
            turn: asyncio.Future[None] = loop.create_future()
            heapq.heappush(self._waiting, (loop.time() + size * _S_PER_UNIT, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._release()
                raise
        cancellation = Cancellation()
        try:
            future = self.threads.submit(_within, cancellation, work)
        except RuntimeError:  # closed
            self._release()
            raise

        def release(_future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        future.add_done_callback(release)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def _release(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


def _within(cancellation: Cancellation, work: Callable[[], Result]) -> Result:
    with cancelled_by(cancellation):
        return work()
