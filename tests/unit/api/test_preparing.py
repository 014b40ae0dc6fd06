"""The order in which requests are prepared: small ones pass large ones, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from tp_engine.api import preparing
from tp_engine.api.preparing import LARGE, PreparingThreads
from tp_engine.system.isolation.cancellation import Cancellation, current_cancellation

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


def test_images_that_take_long_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: another client's request is prepared while one client has as many slow ones as it likes; these go on, and
    all places come back."""
    monkeypatch.setattr(preparing, "_SLOW_S", 0.02)
    go = threading.Event()

    async def scenario() -> None:
        threads = PreparingThreads()
        slow = [
            asyncio.ensure_future(threads.run(9, go.wait, DEADLINE_S, has_images=True, client="a")) for _ in range(100)
        ]
        for client in ("b", "c"):
            quick = threads.run(9, lambda: 7, has_images=True, client=client)
            assert await asyncio.wait_for(quick, DEADLINE_S) == 7
        waiting = asyncio.ensure_future(threads.run(1, lambda: 7, has_images=True, client="a"))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "it has as many places as one client may have"
        go.set()
        assert await asyncio.wait_for(waiting, DEADLINE_S) == 7
        await asyncio.wait_for(asyncio.gather(*slow), DEADLINE_S)
        assert await asyncio.wait_for(threads.run(1, lambda: 7, has_images=True, client="a"), DEADLINE_S) == 7
        line = threads._images
        assert (line._num_free, line._num_slow_free, dict(line._num_of)) == (8, 24, {})
        threads.close()

    asyncio.run(scenario())


def test_work_ends_when_its_task_is_cancelled() -> None:
    """Oracle: the cancellation that the work sees."""
    seen: list[Cancellation] = []
    begun = threading.Event()

    def work() -> None:
        seen.append(current_cancellation())
        begun.set()
        while not seen[0].is_cancelled:
            time.sleep(0.001)

    async def scenario() -> None:
        threads = PreparingThreads()
        for size, has_images in ((1, False), (LARGE + 1, False), (1, True)):
            seen.clear()
            begun.clear()
            task = asyncio.ensure_future(threads.run(size, work, has_images=has_images))
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            task.cancel()
            assert await asyncio.wait_for(threads.run(size, lambda: 7, has_images=has_images), DEADLINE_S) == 7
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
