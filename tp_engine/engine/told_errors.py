"""Errors that cross a process border as JSON: rank 0's, on their way to the program that it serves."""

from __future__ import annotations

import builtins
import traceback

import msgspec

from tp_engine import errors

_EXPECTED = (errors.ConfigError, errors.MemoryBudgetError)


class ToldError(msgspec.Struct, frozen=True, kw_only=True):
    """The class of an error by its name, its words, and the rank that it names.  ``trace`` is the traceback of an error
    that nobody expects."""

    kind: str
    text: str
    rank: int | None = None
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ToldError:
        """Return what another process is told of ``error``."""
        trace = "" if isinstance(error, _EXPECTED) else "".join(traceback.format_exception(error))
        return cls(kind=type(error).__name__, text=str(error), rank=getattr(error, "rank", None), trace=trace)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def rebuilt(self) -> Exception:
        """Return an error of the same class and words; a ``RuntimeError`` that names a class which is not known
        here."""
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        error: Exception
        if kind is errors.RankError:
            rank = self.rank or 0
            error = errors.RankError(rank, self.text.removeprefix(f"rank {rank}: "))
        elif kind is errors.MemoryBudgetError:
            error = errors.MemoryBudgetError(self.text, rank=self.rank)
        elif isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            error = kind(self.text)
        else:
            error = RuntimeError(str(self))
        if self.trace:
            error.add_note(f"The error of rank 0's process:\n{self.trace}")
        return error
