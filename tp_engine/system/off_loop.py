"""Work in threads of its own: for event loops that must not wait, and programs that are at their end.

``asyncio.to_thread`` is refused while the interpreter ends, which is when forgotten engines are closed.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_END_S = 10.0
_NAP_S = 0.1  # a thread that waits in C sees no exception that another thread sends it
_HAS_ENDED = "the event loop has ended"


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
    touched.

    An exception from outside, such as Ctrl-C or a timeout, may strike a thread that waits here at any moment.  So it
    waits in C, and for no lock that is taken in Python, such as a ``Future``'s: struck there, it would leave the lock
    taken, and the loop would wait for it for ever.  Nor does it ask ``Thread.is_alive``, which, struck, takes the
    thread for ended from then on.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._last: asyncio.Task[None] | None = None
        self._has_ended = False
        self._told_end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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

    def run(
        self,
        function: Callable[_Arguments, Coroutine[Any, Any, _Result]],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Let the loop run ``function``, and wait for its result.  What strikes the waiting thread cancels it."""
        tasks: list[asyncio.Task[None]] = []
        try:
            return self._result(partial(function, *arguments, **named), tasks)
        except BaseException:
            self.post(lambda: [task.cancel() for task in tasks])
            raise

    def finish(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the loop run ``function`` as its last work, and wait for the end of both; raises what it raised.  Safe to
        call again, such as after an exception that has struck the waiting thread: the loop ends all the same."""
        self.post(self._begin_last, function)
        while not self._has_ended:
            with suppress(queue.Empty):
                self._told_end.get(timeout=_NAP_S)
        self._thread.join(_END_S)
        if self._last is not None:
            self._last.result()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self._has_ended = True
            self._told_end.put(None)

    def _result(self, function: Callable[[], Coroutine[Any, Any, _Result]], tasks: list[asyncio.Task[None]]) -> _Result:
        """What ``function`` returns in the loop, in a task that is in ``tasks`` until it ends."""
        ended: queue.SimpleQueue[tuple[list[_Result], BaseException | None]] = queue.SimpleQueue()

        async def work() -> None:
            try:
                ended.put(([await function()], None))
            except asyncio.CancelledError:
                ended.put(([], RuntimeError(_HAS_ENDED)))
            except BaseException as error:
                ended.put(([], error))
            finally:
                tasks.clear()

        self.post(lambda: tasks.append(self._loop.create_task(work())))
        while True:
            had_ended = self._has_ended
            with suppress(queue.Empty):
                results, error = ended.get(timeout=_NAP_S)
                break
            if had_ended:
                raise RuntimeError(_HAS_ENDED)
        try:
            if error is not None:
                raise error
            return results[0]
        finally:
            del error  # its traceback holds this frame

    def _begin_last(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._last is None:
            self._last = self._loop.create_task(self._finish(function))

    async def _finish(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await function()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=_END_S)
            self._loop.stop()
