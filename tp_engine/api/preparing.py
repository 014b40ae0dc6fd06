"""The threads in which requests are prepared: read, put into a template, tokenized.

::

    small requests    one thread, so that none waits for long
    large ones        two: long texts wait for each other
    with images       eight: files are fetched, and decoded in other processes; only these wait for that, and slow ones
                      make room for others
    with forced calls two: another process reads the schemas of tools, which may take seconds; otherwise as with images
    large bodies      one: the parser of JSON keeps the GIL, so it pauses after each as long as that took

Waiting requests are ordered by arrival plus a delay for their size: a small request passes larger ones.  What a thread
does for a cancelled task ends soon if it is an isolated call (``system/isolation/``), and its result is dropped.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tp_engine.system.heap import HeapTrimmer
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.panics import panics_refused
from tp_engine.system.units import KIB

LARGE = 64 * KIB
_NUM_LARGE_THREADS = 2
_NUM_IMAGE_THREADS, _NUM_SLOW_IMAGES, _MOST_IMAGES_OF_ONE = 8, 24, 24
_NUM_SCHEMA_THREADS, _NUM_SLOW_SCHEMAS, _MOST_SCHEMAS_OF_ONE = 2, 6, 6
_SLOW_S = 3.0
_S_PER_UNIT = 1e-4  # of a request's size; tokenizing takes about a hundredth of that
_LONGEST_PAUSE_S = 1.0
_HEAP_PER_UNIT = 200  # bytes that tokenizing takes temporarily

Result = TypeVar("Result")


class PreparingThreads:
    """For the tasks of one event loop."""

    def __init__(self) -> None:
        self._small = _Line("preparing", 1)
        self._large = _Line("preparing-large", _NUM_LARGE_THREADS)
        self._images = _Line(
            "preparing-images", _NUM_IMAGE_THREADS, num_slow=_NUM_SLOW_IMAGES, most_of_one=_MOST_IMAGES_OF_ONE
        )
        self._schemas = _Line(
            "preparing-schemas", _NUM_SCHEMA_THREADS, num_slow=_NUM_SLOW_SCHEMAS, most_of_one=_MOST_SCHEMAS_OF_ONE
        )
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
        client: str = "",
        **named: Any,
    ) -> Result:
        """Call ``function`` for a request of ``size`` bytes or characters; not if cancelled before its turn.

        Among requests with images, and with forced calls, none waits because one ``client`` has all threads.
        """
        work = partial(_call, partial(function, *arguments, **named))
        if has_images:
            return await self._images.run(size, work, client)
        if forces_calls:
            return await self._schemas.run(size, work, client)
        if size > LARGE:
            try:
                return await self._large.run(size, work)
            finally:
                self._trimmer.note_freed(size * _HEAP_PER_UNIT)
        return await self._small.run(size, partial(self._timed, work))

    async def parse(self, size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a ``function`` that keeps the GIL, for a large body of ``size`` bytes."""
        return await self._bodies.run(size, partial(self._paused, partial(_call, partial(function, *arguments))))

    def busy_s(self) -> float:
        """The seconds that the small request in preparation has taken so far; 0 if there is none."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def close(self) -> None:
        """End the threads after their present work, without waiting for them."""
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
    with panics_refused("the request cannot be prepared"):
        return work()


class _Line:
    """Some places for work, a thread for each, and those who wait for one.

    ``num_slow``: up to that many that have worked for ``_SLOW_S`` give their places to others, and continue.
    ``most_of_one``: how many places one client may have, those of slow ones too.
    """

    def __init__(self, name: str, num_places: int, *, num_slow: int = 0, most_of_one: int | None = None) -> None:
        self.threads = ThreadPoolExecutor(num_places + num_slow, thread_name_prefix=name)
        self._num_free, self._num_slow_free = num_places, num_slow
        self._most_of_one = num_places if most_of_one is None else most_of_one
        self._num_of: Counter[str] = Counter()
        self._waiting: list[tuple[float, int, str, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], Result], client: str = "") -> Result:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + size * _S_PER_UNIT, next(self._numbers), client, turn))
        self._admit()
        place = _Place(client)
        try:
            await turn
            cancellation = Cancellation()
            future = self.threads.submit(_within, cancellation, work)
        except BaseException:  # cancelled, or closed
            if turn.done() and not turn.cancelled():
                self._leave(place)
            raise
        slow = loop.call_later(_SLOW_S, self._slow_down, place)

        def leave(_future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._leave, place)
                loop.call_soon_threadsafe(slow.cancel)

        future.add_done_callback(leave)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def _admit(self) -> None:
        """Give free places to those who wait: in order, except to clients that have as many as they may."""
        passed = []
        while self._num_free and self._waiting:
            entry = heapq.heappop(self._waiting)
            *_, client, turn = entry
            if turn.done():  # it has left
                continue
            if self._num_of[client] >= self._most_of_one:
                passed.append(entry)
                continue
            self._num_free -= 1
            self._num_of[client] += 1
            turn.set_result(None)
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _slow_down(self, place: "_Place") -> None:
        if self._num_slow_free and not place.has_ended:
            self._num_slow_free -= 1
            self._num_free += 1
            place.is_slow = True
            self._admit()

    def _leave(self, place: "_Place") -> None:
        place.has_ended = True
        self._num_slow_free += place.is_slow
        self._num_free += not place.is_slow
        self._num_of[place.client] -= 1
        if not self._num_of[place.client]:
            del self._num_of[place.client]
        self._admit()


@dataclass(slots=True)
class _Place:
    """The place of one work."""

    client: str
    is_slow: bool = False
    has_ended: bool = False


def _within(cancellation: Cancellation, work: Callable[[], Result]) -> Result:
    with cancelled_by(cancellation):
        return work()
