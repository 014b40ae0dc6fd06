"""The threads in which requests are prepared: read, put into a template, tokenized.

::

    small requests    one thread, so that none waits for long
    large ones        two: long texts wait for each other
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tp_engine.units import KIB

LARGE = 64 * KIB
_NUM_LARGE_THREADS = 2

Result = TypeVar("Result")


class PreparingThreads:
    """For the tasks of one event loop."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(1, thread_name_prefix="preparing")
        self._large = ThreadPoolExecutor(_NUM_LARGE_THREADS, thread_name_prefix="preparing-large")
        self._began_s: float | None = None

    async def run(self, size: int, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call ``function`` for a request of ``size`` bytes or characters; not if cancelled before its turn."""
        work, loop = partial(function, *arguments, **named), asyncio.get_running_loop()
        if size > LARGE:
            return await loop.run_in_executor(self._large, work)
        return await loop.run_in_executor(self._small, self._timed, work)

    def busy_s(self) -> float:
        """How long the small request that is prepared now has taken; 0 if none is."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def close(self) -> None:
        """End the threads after what they do now, without waiting for them."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], Result]) -> Result:
        self._began_s = time.monotonic()
        try:
            return work()
        finally:
            self._began_s = None
