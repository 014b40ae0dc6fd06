"""How many jobs may start at once: starting takes the cores, waiting for an end takes nothing."""

from __future__ import annotations

import threading
from typing import Self


class Gate:
    """Holds one of ``places`` from entering until ``open`` or the end of the block, whichever comes first.

    Without ``places`` it never waits.
    """

    def __init__(self, places: threading.Semaphore | None = None) -> None:
        self._places = places or threading.Semaphore()
        self._holds = False

    def __enter__(self) -> Self:
        self._places.acquire()
        self._holds = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        """Let the next job start."""
        if self._holds:
            self._holds = False
            self._places.release()
