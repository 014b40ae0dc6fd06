"""Work in threads of its own: for event loops that must not wait, and programs that are at their end.

``asyncio.to_thread`` is refused while the interpreter ends, which is when forgotten engines are closed.
"""

import _thread
import asyncio
import queue
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_END_S = 10.0
_NAP_S = 0.1  # a thread that waits in C sees no exception that another thread sends it
_HAS_ENDED = "the event loop has ended"


def started(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> Future[_Result]:
    """Call ``function`` in a new thread, and return its result to come."""
    return _start(partial(function, *arguments, **named), _name(function))[1]


async def in_thread(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Call ``function`` in a new thread and return its result once the thread has ended.  A cancelled caller does not
    wait: isolated calls of ``function`` are cancelled, and its result is dropped."""
    cancellation, work = Cancellation(), partial(function, *arguments, **named)

    def run() -> _Result:
        with cancelled_by(cancellation):
            return work()

    thread, future = _start(run, _name(function))
    waiting = asyncio.shield(asyncio.wrap_future(future))
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if nobody waits any more
    try:
        return await waiting
    except asyncio.CancelledError:
        cancellation.cancel()
        raise
    finally:
        if future.done():
            thread.join(_END_S)


def _start(work: Callable[[], _Result], name: str) -> tuple[threading.Thread, Future[_Result]]:
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, future


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", "work")


class LoopThread:
    """An event loop in a thread of its own, which other threads ask; the program's own loops and signals are not
    touched.  It ends with ``finish``, and when nobody has this object any more.

    An exception from outside, such as Ctrl-C or a timeout, may strike a thread that waits here at any moment.  So it
    waits in C, and for no lock that is taken in Python, such as a ``Future``'s: struck there, it would leave the lock
    taken, and the loop would wait for it for ever.  Nor does it ask ``Thread.is_alive``, which, struck, takes the
    thread for ended from then on.  Whatever catches errors (a ``TimeoutError`` is an ``OSError``) runs in the loop's
    thread, or in others that the loop starts (``in_thread``): nothing from outside strikes them.
    """

    def __init__(self, name: str) -> None:
        self._posts, self._end = _Posts(), _End()
        self._last: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=_serve, args=(self._posts, self._end), name=name, daemon=True)
        weakref.finalize(self, self._posts.put, _stop, ()).atexit = False  # its maker may be struck
        _begin(self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is that of the loop."""
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Let the loop call ``function`` soon; does nothing once the loop has ended."""
        self._posts.put(function, arguments)

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
        while not self._end.has_come:
            with suppress(queue.Empty):
                self._end.told.get(timeout=_NAP_S)
        self._thread.join(_END_S)
        if self._last is not None:
            self._last.result()

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

        self.post(lambda: tasks.append(asyncio.ensure_future(work())))
        while True:
            had_ended = self._end.has_come
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
            self._last = asyncio.ensure_future(self._finish(function))

    async def _finish(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await function()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=_END_S)
            _stop()


class _End:
    """Whether a loop has ended; ``told`` gets an entry then."""

    def __init__(self) -> None:
        self.has_come = False
        self.told: queue.SimpleQueue[None] = queue.SimpleQueue()


class _Posts:
    """What other threads let a loop call.  ``call_soon_threadsafe`` of asyncio takes a ``TimeoutError`` that strikes
    the calling thread for one of its socket's, and drops it; this costs less, too."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def put(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Let the loop call ``function`` soon, from any thread; does nothing once the loop has ended."""
        self._waiting.append((function, arguments))
        try:
            self._waker.send(b"\0")
        except OSError as error:  # it is full, so that the loop is woken already, or closed
            if error.errno is None:  # not the socket's: something struck this thread
                raise

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run ``loop``, and what is put here, until it stops."""
        loop.add_reader(self._woken, self._call, loop)
        try:
            loop.run_forever()
        finally:
            loop.remove_reader(self._woken)
            self._woken.close()
            self._waker.close()

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._waiting:
            function, arguments = self._waiting.popleft()
            try:
                function(*arguments)
            except Exception as error:
                words = f"a call from another thread failed: {function!r}"
                loop.call_exception_handler({"message": words, "exception": error})


def _begin(thread: threading.Thread) -> None:
    """Start a thread.  ``Thread.start`` waits for a lock that is taken in Python, so another thread does it: one of
    which Python keeps no account."""
    begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def begin() -> None:
        try:
            thread.start()
        except Exception as error:  # there may be no room for a thread
            begun.put(error)
        else:
            begun.put(None)

    _thread.start_new_thread(begin, ())
    if (error := begun.get()) is not None:
        raise error


def _stop() -> None:
    asyncio.get_running_loop().stop()


def _serve(posts: _Posts, end: _End) -> None:
    loop = asyncio.SelectorEventLoop()
    try:
        posts.serve(loop)
    finally:
        loop.close()
        end.has_come = True
        end.told.put(None)
