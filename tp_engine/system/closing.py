"""The end of engines: a base class for what a ``with`` block closes, and whether an engine may still be used."""

import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from tp_engine.errors import EngineDeadError


class Closing(ABC):
    """A context manager of itself; ``close`` may be called more than once."""

    @abstractmethod
    def close(self) -> None:
        """Release all that this object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Ending:
    """The end of one engine; ``failure`` is the error that ended it.  The engine belongs to the process that made it.
    In a process forked from that one, its copy counts as closed: it can be neither used nor closed there, so the end of
    a forked process stops no rank of its parent."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._closed_because = ""
        self._process = os.getpid()
        _endings.add(self)

    def close(self) -> bool:
        """Close the engine to calls; return whether it was still open."""
        was_open = not self._closed_because
        self._closed_because = self._closed_because or "the engine is closed"
        return was_open

    @property
    def is_here(self) -> bool:
        """Whether the engine belongs to this process."""
        return self._process == os.getpid()

    def check(self) -> None:
        """``EngineDeadError`` if the engine may not be used any more."""
        if self._closed_because and self.failure is None:
            raise EngineDeadError(self._closed_because)
        if self.failure is not None:
            words = str(self.failure) or type(self.failure).__name__
            raise EngineDeadError(f"the engine stopped after an error: {words}") from self.failure

    def disown(self) -> None:
        """In a forked process: this copy of an engine is another process's."""
        self._closed_because = (
            f"the engine belongs to process {self._process}, from which this process was forked; "
            "use it there, or create an engine here"
        )


_endings: weakref.WeakSet[Ending] = weakref.WeakSet()


def _disown_all() -> None:
    for ending in _endings:
        ending.disown()


os.register_at_fork(after_in_child=_disown_all)
