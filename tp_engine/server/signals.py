"""SIGTERM and SIGINT of a launched process: the first asks for an orderly stop, the second for an immediate one.

A separate thread reads signals from the interpreter's wake-up descriptor, because the main thread may be inside a
collective or a kernel for any length of time.  Only launchers use this; a library installs no handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
UNINTERRUPTIBLE_S = 3.0


class StopRequested(BaseException):
    """Raised in the main thread by a signal that arrives while the process is still starting."""


class StopSignals:
    """Context manager for the main thread.  Callbacks run on the signal thread, each at most once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_received = 0
        self._callbacks: list[Callable[[], None]] = []
        self._raising = False
        self._last: Callable[[], None] = lambda: None
        self._restore: list[tuple[signal.Signals, Any]] = []

    @property
    def received(self) -> bool:
        """Whether any stop signal has arrived."""
        return self._num_received > 0

    def __enter__(self) -> StopSignals:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._restore = [(number, signal.signal(number, self._in_main_thread)) for number in STOP_SIGNALS]
        self._old_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._old_descriptor = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_descriptor)
        sys.unraisablehook = self._old_hook
        for number, handler in self._restore:
            # After a stop the process is ending; another signal would only interrupt that.
            signal.signal(number, signal.SIG_IGN if self.received else handler)
        self._sender.close()
        self._thread.join(timeout=1.0)
        self._receiver.close()

    @contextlib.contextmanager
    def raising(self, last: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Within, the first signal raises ``StopRequested``.

        If the main thread does not see it within seconds or is in an import, or a second signal comes, the process
        calls ``last()`` and ends with code 0.
        """
        self._last = last
        with self._lock:
            self._callbacks = [lambda: end_process_after(UNINTERRUPTIBLE_S, 0, last), lambda: end_process(0, last)]
            self._raising = True
        if self.received:
            raise StopRequested
        try:
            yield
        finally:
            self._raising = False

    def on_stop(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Set the callbacks for the first and the second signal; runs those of earlier signals at once."""
        with self._lock:
            self._callbacks = [first, second]
            due = self._callbacks[: self._num_received]
        for callback in due:
            callback()

    def _in_main_thread(self, _number: int, frame: FrameType | None) -> None:
        if not self._raising:
            return
        self._raising = False
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if frame is None:
            raise StopRequested
        end_process_after(0.0, 0, self._last)  # an exception while torch's C++ modules are imported aborts the process

    def _unraisable(self, unraisable: Any) -> None:
        """Print no traceback if ``StopRequested`` is lost in a finalizer or a callback."""
        if unraisable.exc_type is not StopRequested:
            self._old_hook(unraisable)

    def _listen(self) -> None:
        while data := self._receiver.recv(64):
            for number in data:
                if number in STOP_SIGNALS:
                    self._note()

    def _note(self) -> None:
        with self._lock:
            self._num_received += 1
            callback = self._callbacks[self._num_received - 1] if self._num_received <= len(self._callbacks) else None
        if callback is not None:
            callback()


def end_process_after(delay_s: float, code: int, last: Callable[[], None] = lambda: None) -> None:
    """Call ``last`` and end this process with ``code`` after ``delay_s``, from another thread.

    The process may end sooner by itself; but its stop may be stuck in a collective.
    """
    timer = threading.Timer(delay_s, end_process, (code, last))
    timer.daemon = True
    timer.start()


def end_process(code: int, last: Callable[[], None]) -> None:
    """Call ``last`` and end this process with ``code``, at once and from any thread."""
    try:
        last()
    finally:
        os._exit(code)
