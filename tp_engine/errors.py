"""The errors of the engine; the cause decides the type.

A user's mistake is a ``ConfigError`` or a ``RequestError`` (both ``ValueError``), which names the value, the rule and
the remedy.  A mistake of the engine is an ``assert``.  A fault of the machine is a ``RuntimeError`` with the rank.
"""

import copy
import difflib
import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

_SHORTEST_BEGINNING = 3
_LONGEST_NAME = 200
# Control characters (Unicode's category Cc) as pictures of themselves; those above 0x7e have no pictures of their own.
_SEEN = {code: chr(0x2400 + code) for code in range(0x20) if code not in b"\t\n"} | dict.fromkeys(
    range(0x7F, 0xA0), "\ufffd"
)
_SEEN[ord("\r")] = ""
# Codes of errors: of a request that is refused for now, which a server answers with HTTP 503, and of one that ended
# because of its own grammar, or because its own fields leave no token that may come.
CODE_UNAVAILABLE = "service_unavailable"
INVALID_GRAMMAR = "invalid_grammar"
NO_TOKEN_LEFT = "no_token_left"

_Kept = TypeVar("_Kept", bound=BaseException)


class ConfigError(ValueError):
    """A configuration that cannot work; raised before a device is touched."""


class RequestError(ValueError):
    """A request that cannot be served; the engine is unchanged.  ``param`` names the offending field and ``code`` is
    the OpenAI error code (``context_length_exceeded``), if any; ``row`` is that of a call of many, and ``outputs`` are
    those of its rows that are done."""

    row: int | None = None
    outputs: Sequence[Any] = ()

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ContextLengthError(RequestError):
    """A request that the model's context cannot hold.

    ``num_prompt`` is the length of the prompt in tokens, or the least that it can be; ``num_asked`` is the number of
    tokens to generate if that is what does not fit, else None; ``longest`` is the size of the context.
    """

    def __init__(
        self, message: str, *, param: str, num_prompt: int, longest: int, num_asked: int | None = None
    ) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_prompt, self.longest, self.num_asked = num_prompt, longest, num_asked

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


class WeightError(RuntimeError):
    """A checkpoint whose tensors are missing, unexpected or wrongly shaped."""


class PlanError(RuntimeError):
    """A step plan that is lost, repeated, corrupted or malformed."""


class RankError(RuntimeError):
    """A rank that died, failed or did not answer before its deadline."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


class MemoryBudgetError(RuntimeError):
    """The device has too little memory for the configuration; the message has the numbers and the remedy.  All ranks
    raise the same error; ``rank`` is the first rank with too little, or None if all ranks are alike."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class EngineDeadError(RuntimeError):
    """The engine has stopped; every request in flight ends with this error."""


def again(error: _Kept) -> _Kept:
    """A copy of an error that is kept, with its cause, to be raised.  The traceback of one object would grow with each
    raise, hold the callers' frames, and mix those of threads that raise it at once."""
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh


def _remade(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """A copied or unpickled error whose ``args`` are not those of its ``__init__``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def shown(value: object, limit: int = 80) -> str:
    """``value`` as error messages show it: at most ``limit`` characters; of a long value only the beginning is read."""
    text = _Brief(limit).repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def printable(text: str) -> str:
    """``text`` as a terminal may show it: control characters other than tabs and line ends are seen, not obeyed.

    They could move the cursor, hide text, or write to the clipboard.  A carriage return is left out.
    """
    return text.translate(_SEEN)


class _Brief(reprlib.Repr):
    """``repr`` of the beginning of a value of any size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = limit // 3 + 1  # "1, " each
        self.maxother = 3 * limit

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[: self._limit + 1])

    def repr_dict(self, value: Mapping[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        items = itertools.islice(value.items(), self.maxdict)
        return f"{{{', '.join(f'{self.repr1(key, level - 1)}: {self.repr1(one, level - 1)}' for key, one in items)}}}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` with the nearest known name, or one that begins alike; an empty string if none does."""
    if len(name) > _LONGEST_NAME:  # a stranger may have sent it
        return ""
    names = list(known)
    begins_alike = [one for one in names if len(name) > _SHORTEST_BEGINNING and one.startswith(name)]
    nearest = [*difflib.get_close_matches(name, names, n=1, cutoff=0.6), *begins_alike]
    return f"; did you mean {nearest[0]}?" if nearest else ""
