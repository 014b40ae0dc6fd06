"""The order in which requests are prepared: small ones pass large ones, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from tp_engine.api.preparing import LARGE, PreparingThreads

DEADLINE_S = 100.0


def test_a_small_request_passes_larger_ones_that_wait() -> None:
    """Oracle: by size, below the limit for large ones too; one that left is not called, and large ones have threads of
    their own."""
    done: list[int] = []
    go = threading.Event()

    def note(size: int) -> Callable[[], None]:
        return lambda: done.append(size)

    async def scenario() -> None:
        threads = PreparingThreads()
        first = asyncio.ensure_future(threads.run(9, go.wait, DEADLINE_S))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(threads.run(size, note(size))) for size in (LARGE, 60_000, 30_000, 3)]
        await threads.run(LARGE + 1, note(LARGE + 1))
        assert done == [LARGE + 1] and threads.busy_s() > 0
        waiting.pop(1).cancel()
        go.set()
        await asyncio.wait_for(asyncio.gather(first, *waiting), DEADLINE_S)
        assert done == [LARGE + 1, 3, 30_000, LARGE] and threads.busy_s() == 0
        await threads.run(1, note(1))
        threads.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_in_its_turn_passes_it_on() -> None:
    """Oracle: whoever waits next is called."""

    async def scenario() -> None:
        threads, go = PreparingThreads(), threading.Event()
        running = asyncio.ensure_future(threads.run(1, go.wait, DEADLINE_S))
        await asyncio.sleep(0)
        left, last = (asyncio.ensure_future(threads.run(size, lambda: 7)) for size in (2, 3))
        await asyncio.sleep(0)
        running.add_done_callback(lambda _done: left.cancel())
        go.set()
        assert await asyncio.wait_for(last, DEADLINE_S) == 7
        with contextlib.suppress(asyncio.CancelledError):
            await left
        threads.close()

    asyncio.run(scenario())


def test_errors_of_large_bodies_come_back() -> None:
    """Oracle: the exception of the function; the next body is read."""

    async def scenario() -> None:
        threads = PreparingThreads()
        try:
            await threads.parse(1 << 20, int, "x")
        except ValueError as error:
            assert "invalid literal" in str(error)
        assert await threads.parse(1 << 20, int, "7") == 7
        threads.close()

    asyncio.run(scenario())
