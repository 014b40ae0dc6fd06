"""Whether anybody still waits for what a thread does.

Who gives work to a thread makes a ``Cancellation``, and lets the thread work within ``cancelled_by``.  What the thread
calls, however deep, need not know of it: an isolated call ends by itself when its caller is cancelled.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar


class Cancellation:
    """Nobody waits for a work any more, from ``cancel`` on; for any thread."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End the work, soon; may be called more than once, also after the work's end."""
        with self._lock:
            self.is_cancelled = True
            for call in self._calls:
                call()

    @contextlib.contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Within, ``cancel`` makes this ``call``, which must not wait; at once if it has come before."""
        with self._lock:
            self._calls.append(call)
            if self.is_cancelled:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)


_CURRENT: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


@contextlib.contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Within, in this thread or task, all work ends with ``cancellation``."""
    token = _CURRENT.set(cancellation)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_cancellation() -> Cancellation:
    """Return the cancellation of this thread's or task's work; one that never comes if it has none."""
    return _CURRENT.get() or Cancellation()
