"""Panics: what a library in Rust raises when its own code fails, mostly over data that it was not made for.

They are ``BaseException``s, which no ``except Exception`` sees: one would pass every place that gives a request its
error, and end the batch, the thread or the process beside it.  So whoever hands a client's data to libraries does it
within ``panics_refused``.  Other ``BaseException``s are meant for the thread that runs: Ctrl-C, the end of a task, the
timeout of a test or of a call.
"""

import contextlib
from collections.abc import Iterator

from tp_engine.errors import RequestError

_PANICS = "pyo3_runtime"  # the module of their class, of which each library has its own
_MOST_WORDS = 200


def is_panic(error: BaseException) -> bool:
    """Return whether ``error`` is a panic."""
    return type(error).__module__ == _PANICS


@contextlib.contextmanager
def panics_refused(what: str, param: str | None = None) -> Iterator[None]:
    """Within, a panic becomes a ``RequestError``: that ``what`` failed, and why."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        raise RequestError(f"{what}: the library that reads it failed ({reason})", param=param) from error
