"""Steps of the start that all ranks take or none."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from tp_engine.errors import RankError
from tp_engine.log import get_logger
from tp_engine.topology import RankInfo

logger = get_logger(__name__)

Result = TypeVar("Result")


class Agreeing(Protocol):
    """The host collective that ``all_do`` needs."""

    info: RankInfo

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order."""


def all_do(host: Agreeing, what: str, option: str, body: Callable[[], Result], *, is_required: bool) -> Result | None:
    """Return the result of ``body``, which is never None; None on every rank if ``body`` fails on any rank.

    The reason is logged, or raised as ``RankError`` if ``is_required``: ``what`` has failed, ``option`` asked for it.
    """
    result: Result | None = None
    try:
        result, failure = body(), ""
    except RankError:  # the job has failed, not only this step of it
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    reports = [report.decode() for report in host.all_gather_bytes(failure.encode())]
    failed = next((rank for rank, report in enumerate(reports) if report), None)
    if failed is None:
        return result
    if is_required:
        raise RankError(failed, f"all_reduce_backend is {option}, but {what} failed: {reports[failed]}; use auto")
    if host.info.is_first:
        logger.warning("no %s, all-reduces go to the library: rank %d: %s", what, failed, reports[failed])
    return None
