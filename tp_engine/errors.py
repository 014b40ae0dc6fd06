"""Who is at fault decides the type.

A user's fault is a ``ConfigError`` or a ``RequestError`` (both ``ValueError``): it names the value, the rule and the
remedy.  Our own fault is an ``assert``.  The machine's fault is a ``RuntimeError`` that names the rank.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that can not work; raised before any device is touched."""


class RequestError(ValueError):
    """A request that can not be served; the engine is untouched by it.

    ``param`` names the offending field and ``code`` is the OpenAI error code (``context_length_exceeded``), if any.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class WeightError(RuntimeError):
    """A checkpoint whose tensors are missing, unexpected or wrongly shaped."""


class PlanError(RuntimeError):
    """A step plan that is lost, repeated, corrupted or malformed."""


class RankError(RuntimeError):
    """A rank that died, failed or did not answer before its deadline."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank


class MemoryBudgetError(RuntimeError):
    """The device has too little memory for what was asked; carries the numbers and the remedy.

    All ranks raise the same; ``rank`` is the first one that had too little, None where none is worse off than others.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class EngineDeadError(RuntimeError):
    """The engine has stopped; every request in flight ends with this."""


def shown(value: object, limit: int = 80) -> str:
    """``value`` as error messages show it: at most ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
