"""Steps that all ranks take or none."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from tp_engine.errors import ConfigError, RankError, RequestError
from tp_engine.job.topology import RankInfo
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")


class Agreeing(Protocol):
    """The host collective that ``attempt`` needs."""

    info: RankInfo

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order."""


def attempt(host: Agreeing, body: Callable[[], Result]) -> tuple[Result | None, Exception | None, dict[int, str]]:
    """Run ``body`` on every rank; return its result, this rank's own error, and the text of each rank's error.  A
    collective, unless ``body`` raises ``RankError``: then the job has failed, not only this step of it."""
    result, failure = None, None
    try:
        result = body()
    except RankError:
        raise
    except Exception as error:
        failure = error
    is_users = isinstance(failure, (ConfigError, RequestError))  # its message says all
    text = "" if failure is None else str(failure) if is_users else f"{type(failure).__name__}: {failure}"
    # A path or a tensor's name may have half a surrogate pair; this rank must not fail alone because of it.
    reports = host.all_gather_bytes(text.encode(errors="replace"))
    return result, failure, {rank: report.decode() for rank, report in enumerate(reports) if report}


def all_do(host: Agreeing, what: str, option: str, body: Callable[[], Result], *, is_required: bool) -> Result | None:
    """The result of ``body``, which is never None; None on every rank if ``body`` fails on any.

    The reason is logged, or raised as ``RankError`` if ``is_required``: ``what`` failed, and ``option`` asked for it.
    """
    result, _, failed = attempt(host, body)
    if not failed:
        return result
    rank, text = next(iter(failed.items()))
    if is_required:
        raise RankError(rank, f"all_reduce_backend is {option}, but {what} failed: {text}; use auto")
    if host.info.is_first:
        logger.warning("no %s, all-reduces go to the library: rank %d: %s", what, rank, text)
    return None
