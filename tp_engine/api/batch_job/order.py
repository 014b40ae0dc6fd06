"""In which order results are written: as they come, or held back until those of all lines before have come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class ResultOrder(Generic[Result]):
    """Passes results, numbered from 0, to ``write``; with ``keeps_order`` in the order of their numbers.

    At most ``window`` numbers are on their way at a time then: ``has_room`` tells whether the next may start.
    """

    def __init__(self, write: Callable[[Result], None], *, keeps_order: bool, window: int) -> None:
        self._write = write
        self._keeps_order = keeps_order
        self._window = window
        self._held: dict[int, Result] = {}
        self._next = 0

    def has_room(self, ordinal: int) -> bool:
        """Whether the work with this number may start; always, if nothing before it is under way."""
        return not self._keeps_order or ordinal - self._next < self._window

    def put(self, ordinal: int, result: Result) -> None:
        """Take the result with this number."""
        if not self._keeps_order:
            self._write(result)
            return
        self._held[ordinal] = result
        while self._next in self._held:
            self._write(self._held.pop(self._next))
            self._next += 1
