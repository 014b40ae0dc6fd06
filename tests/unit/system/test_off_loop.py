"""Event loops in threads of their own, and work in threads that they start."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import on_this_machine
from tp_engine.system.isolation.cancellation import current_cancellation
from tp_engine.system.off_loop import LoopThread, in_thread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("tested")
    yield made
    made.finish(nothing)


async def nothing() -> None:
    """The last work of a loop that has none."""


def wait_until_ended(name: str) -> None:
    deadline_s = time.monotonic() + on_this_machine(20)
    while name in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_thread_has_ended_when_its_result_is_there(loop: LoopThread) -> None:
    """Oracle: the threads from before, at once."""
    before = threading.active_count()
    for number in range(100):
        assert loop.run(in_thread, lambda number=number: number) == number
        assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        loop.run(in_thread, lambda: 1 // 0)
    assert threading.active_count() == before


def test_work_whose_caller_leaves_is_cancelled(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what an isolated call within would ask; the loop goes on."""
    begun, seen = threading.Event(), threading.Event()

    def work() -> None:
        with current_cancellation().calling(seen.set):
            begun.set()
            assert seen.wait(20)

    async def leave() -> None:
        task = asyncio.ensure_future(in_thread(work))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    loop.run(leave)
    assert seen.wait(20)
    wait_until_ended("work")


def test_a_loop_that_nobody_has_ends() -> None:
    """Oracle: its thread; an exception may strike between its start and the name that it was to get."""
    LoopThread("forgotten")
    gc.collect()
    wait_until_ended("forgotten")


def test_what_strikes_a_thread_that_posts_is_its_own(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the exception: a TimeoutError is an OSError, but none of the socket's; the socket's own are dropped."""

    class Waker:
        def __init__(self, error: OSError) -> None:
            self.error = error

        def send(self, data: bytes) -> None:
            raise self.error

    posts: Any = loop._posts
    with monkeypatch.context() as patch:
        patch.setattr(posts, "_waker", Waker(TimeoutError("struck")))
        with pytest.raises(TimeoutError, match="struck"):
            loop.post(list)
        patch.setattr(posts, "_waker", Waker(BlockingIOError(11, "it is full")))
        loop.post(list)
    loop.run(nothing)


def test_a_post_that_fails_ends_no_loop(loop: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the log; the next answer."""
    with caplog.at_level(logging.ERROR):
        loop.post(lambda: 1 // 0)
        loop.run(nothing)
    assert "a call from another thread failed" in caplog.text


def test_a_loop_that_has_ended_takes_nothing() -> None:
    """Oracle: an error, no wait; a post is dropped; a second end does nothing."""
    loop = LoopThread("ended")
    loop.finish(nothing)
    loop.post(list)
    with pytest.raises(RuntimeError, match="has ended"):
        loop.run(nothing)
    loop.finish(nothing)
