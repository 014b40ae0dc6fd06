"""The pixels of a request's images on their way to the ranks of this host: a file in memory, without a name.

The ranks read it as ``/proc/PID/fd/FD``.  It lives as long as an ``ImageInput`` of it does in this process: nothing has
to be told that the request ended, in whichever way, and nothing is left behind when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tp_engine.errors import CODE_UNAVAILABLE, RequestError
from tp_engine.images.image_input import ImageInput

ALIGNMENT = 64
_WAIT_S = 10.0
_LOOK_S = 0.02


class ByteBudget:
    """So many bytes of memory, which threads take and give back; None has no end.

    Who finds no room waits for ``wait_s``.
    """

    def __init__(self, num_bytes: int | None, what: str) -> None:
        self.wait_s = _WAIT_S
        self._num_bytes, self._what = num_bytes, what
        self._taken = 0
        self._lock = threading.Lock()
        # finalizers give back, in any thread at any time: they may not wait for the lock
        self._returned: deque[int] = deque()

    @property
    def used(self) -> int:
        """Bytes that are taken now."""
        with self._lock:
            while self._returned:
                self._taken -= self._returned.popleft()
            return self._taken

    def take(self, num_bytes: int) -> None:
        """Take bytes when there is room; more than all of them are taken alone.

        Raises ``RequestError`` (``service_unavailable``) if there is no room in time.
        """
        deadline_s = time.monotonic() + self.wait_s
        while not self._try(num_bytes):
            if time.monotonic() > deadline_s:
                raise RequestError(
                    f"there is no room for {num_bytes:,} bytes of {self._what} now; try again",
                    param="messages",
                    code=CODE_UNAVAILABLE,
                )
            time.sleep(_LOOK_S)

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self._returned.append(num_bytes)

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Take bytes for the time of a ``with`` block."""
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)

    def _try(self, num_bytes: int) -> bool:
        used = self.used
        with self._lock:
            has_room = self._num_bytes is None or not used or self._taken + num_bytes <= self._num_bytes
            self._taken += num_bytes if has_room else 0
            return has_room


class StagedImage(ImageInput):
    """An image that keeps the file of its pixels open as long as it lives; crosses process borders as its base."""

    __slots__ = ("_memory",)
    _memory: ImageMemory

    @property
    def loading_s(self) -> tuple[float, float]:
        """When all images of the request began to be read, and when they were there (monotonic)."""
        return self._memory.loading_s


class ImageMemory:
    """One file for all images of a request: ``num_bytes``, taken from ``budget`` until the last of them is gone."""

    def __init__(self, num_bytes: int, budget: ByteBudget) -> None:
        self.loading_s = (time.monotonic(),) * 2
        budget.take(num_bytes)
        try:
            self.fd = os.memfd_create("tp_engine images", os.MFD_CLOEXEC)
            close = weakref.finalize(self, _close, self.fd, num_bytes, budget.give_back)
            close.atexit = False
        except BaseException:
            budget.give_back(num_bytes)
            raise
        os.ftruncate(self.fd, num_bytes)
        self._view = mmap.mmap(self.fd, num_bytes)

    def content(self, offset: int, num_bytes: int) -> memoryview:
        """Return the bytes of one image, which has been written into the file ``fd``."""
        return memoryview(self._view)[offset : offset + num_bytes]

    def end(self) -> float:
        """All images are there; returns the seconds that this took."""
        self.loading_s = self.loading_s[0], time.monotonic()
        return self.loading_s[1] - self.loading_s[0]

    def hold(self, image: StagedImage) -> StagedImage:
        """Keep the file open as long as ``image`` lives."""
        object.__setattr__(image, "_memory", self)
        return image


def _close(fd: int, num_bytes: int, give_back: Callable[[int], None]) -> None:
    os.close(fd)
    give_back(num_bytes)
