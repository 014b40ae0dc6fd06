"""The second pass over the input: each line that is still open, ready to run or with the reason why it can not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tp_engine.api.batch_job.endpoints import ENDPOINTS, PreparedLine
from tp_engine.api.batch_job.lines import BatchRequest, LineError, ResultLine, bad_line, read_line, repeated_line
from tp_engine.api.batch_job.source import Source
from tp_engine.api.batch_job.survey import LineState, Survey
from tp_engine.errors import RequestError
from tp_engine.log import get_logger

logger = get_logger(__name__)

PrepareRequest: TypeAlias = Callable[[BatchRequest], PreparedLine]

_OPEN = (LineState.RUN, LineState.BAD, LineState.REPEATED)


@dataclass(slots=True, kw_only=True)
class Work:
    """One open line, the ``ordinal``-th of the job: a ``request`` and what answers it, or its ``result`` already.

    ``num_bytes`` is the length of the line.
    """

    ordinal: int
    num_bytes: int
    request: BatchRequest | None = None
    prepared: PreparedLine | None = None
    result: ResultLine | None = None


def open_lines(source: Source, survey: Survey, prepare: PrepareRequest) -> Iterator[Work]:
    """In the order of the input; what ``prepare`` raises becomes the line's result."""
    ordinal = 0
    for number, text in source.lines():
        if number > len(survey.states):
            logger.warning(
                "the input has grown since it was checked; lines from %d on are left for the next run", number
            )
            return
        state = survey.states[number - 1]
        if state in _OPEN:
            work = Work(ordinal=ordinal, num_bytes=len(text or b""))
            _fill(work, number, text, survey, prepare)
            yield work
            ordinal += 1


def _fill(work: Work, number: int, text: bytes | None, survey: Survey, prepare: PrepareRequest) -> None:
    try:
        if survey.states[number - 1] == LineState.REPEATED:
            raise repeated_line(number, survey.first_line(number))
        work.request = read_line(number, text, ENDPOINTS)
    except LineError as error:
        work.result = bad_line(number, text, error)
        return
    try:
        work.prepared = prepare(work.request)
    except Exception as error:
        if not isinstance(error, RequestError):
            logger.exception("line %d can not be prepared: %s", number, error)
        work.result = work.request.failure(error)
