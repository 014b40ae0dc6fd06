"""Work in threads of its own: for event loops that must not wait, and programs that are at their end.

``asyncio.to_thread`` is refused while the interpreter ends, which is when forgotten engines are closed.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_JOIN_S = 10.0


def started(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> Future[_Result]:
    """Call ``function`` in a new thread, and return its result to come."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(function, "__name__", "work"), daemon=True).start()
    return future


async def in_thread(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Call ``function`` in a new thread and return its result; a cancelled caller does not wait for it."""
    waiting = asyncio.shield(asyncio.wrap_future(started(function, *arguments, **named)))
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if nobody waits any more
    return await waiting


class LoopThread:
    """An event loop in a thread of its own, which other threads ask; the program's own loops and signals are not
    touched."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is that of the loop."""
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Let the loop call ``function`` soon; does nothing once the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Let the loop run ``coroutine``."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Let the loop run ``coroutine`` and wait for its result.  An error that comes to the waiting thread from
        outside, such as Ctrl-C, cancels it."""
        future = self.spawn(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop with all that runs in it; safe to call twice."""
        if self._loop.is_closed():
            return
        self.post(self._end)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.create_task(self._stop_after(tasks))

    async def _stop_after(self, tasks: set[asyncio.Task[Any]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_JOIN_S)
        self._loop.stop()
