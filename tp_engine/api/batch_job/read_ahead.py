"""An iterator that is worked off by a thread of its own, a bounded number of items ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from tp_engine.closing import Closing

_JOIN_S = 10.0


class Sized(Protocol):
    """What the bound on memory needs to know of an item."""

    num_bytes: int


Item = TypeVar("Item", bound=Sized)


class ReadAhead(Generic[Item], Closing):
    """Takes items while fewer than ``max_items`` are ready and these have fewer than ``max_bytes``.

    An exception of the iterator comes out of ``get``, after the items before it.
    """

    def __init__(self, items: Iterator[Item], *, max_items: int, max_bytes: int) -> None:
        self._items = items
        self._max_items, self._max_bytes = max_items, max_bytes
        self._ready: deque[Item] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._ended = self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        """Whether ``get`` has given everything."""
        with self._changed:
            return self._ended and not self._ready and self._error is None

    def get(self, timeout_s: float) -> Item | None:
        """The next item; None at the end, or if none is ready within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._ended, timeout_s)
            if self._ready:
                item = self._ready.popleft()
                self._num_bytes -= item.num_bytes
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        """End the thread; what it has read is forgotten."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        """Wait for room; False when closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (len(self._ready) < self._max_items and self._num_bytes < self._max_bytes)
            )
            self._ready.append(item)
            self._num_bytes += item.num_bytes
            self._changed.notify_all()
            return not self._closing
