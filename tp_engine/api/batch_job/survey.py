"""The first pass over the input: it checks every line and notes what the second pass must do.

::

    state of a line     what the second pass does with it
    BLANK, ELSEWHERE    nothing: the line is empty, or belongs to another shard
    DONE, DONE_FAILED   nothing: an earlier run wrote its result, an answer or an error
    RUN                 runs it
    BAD                 writes an error: the line is not a request, or the request can not be served
    REPEATED            writes an error: an earlier line has its custom_id

A survey keeps one byte per line, and about 40 more until it is complete.
"""

from __future__ import annotations

import enum
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tp_engine.api.batch_job.config import takes_line
from tp_engine.api.batch_job.endpoints import ENDPOINTS
from tp_engine.api.batch_job.lines import BatchRequest, LineError, problem_code, read_line, repeated_line
from tp_engine.api.batch_job.results import CustomIds, EarlierResults
from tp_engine.api.batch_job.source import BatchInput
from tp_engine.log import get_logger

logger = get_logger(__name__)

MAX_REPORTED = 100
_STOP_CHECK_LINES = 256

CheckRequest: TypeAlias = Callable[[BatchRequest], object]


class LineState(enum.IntEnum):
    """What the second pass does with a line; see above."""

    BLANK = 0
    ELSEWHERE = 1
    DONE = 2
    DONE_FAILED = 3
    RUN = 4
    BAD = 5
    REPEATED = 6


@dataclass(slots=True, kw_only=True)
class Survey:
    """``states[0]`` is the first line's; ``problems`` counts by code those of this shard's lines.

    ``num_foreign`` results of earlier runs belong to no line.  ``first_lines``: the number of a line that repeats a
    ``custom_id`` -> that of the first line that has it.
    """

    states: bytearray = field(default_factory=bytearray)
    problems: Counter[str] = field(default_factory=Counter)
    num_foreign: int = 0
    first_lines: dict[int, int] = field(default_factory=dict)

    def count(self, *states: LineState) -> int:
        """Number of lines in any of ``states``."""
        return sum(self.states.count(state) for state in states)

    @property
    def num_requests(self) -> int:
        """Lines of this shard that are not blank."""
        return len(self.states) - self.count(LineState.BLANK, LineState.ELSEWHERE)

    @property
    def num_left(self) -> int:
        """Lines without a result."""
        return self.count(LineState.RUN, LineState.BAD, LineState.REPEATED)

    def note_problem(self, number: int, error: Exception) -> None:
        """Count the problem of line ``number``; the log has the first ones."""
        if self.problems.total() < MAX_REPORTED:
            logger.warning("line %d: %s", number, str(error).removeprefix(f"line {number} "))
        self.problems[problem_code(error)] += 1


def survey_lines(
    source: BatchInput,
    earlier: EarlierResults,
    shard: tuple[int, int],
    check: CheckRequest,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Survey | None:
    """Read the whole input once; ``check`` raises ``RequestError`` for a request that can not be served.

    ``shard`` is ``BatchConfig.input_shard``.  Logs the numbers of lines that are bad or repeat another.  None if a stop
    was requested before the end.
    """
    started_s = time.monotonic()
    survey, ids, numbers = Survey(), CustomIds(), array("q")
    refused = frozenset(earlier.refused_lines)
    for number, text in source.lines():
        survey.states.extend(bytes(number - 1 - len(survey.states)))  # ``lines`` skips blank ones
        if number % _STOP_CHECK_LINES == 0 and stop_requested():
            return None
        state = LineState.RUN if takes_line(shard, number) else LineState.ELSEWHERE
        try:
            request = read_line(number, text, ENDPOINTS)
            ids.add(request.custom_id)
            numbers.append(number)
            if state is LineState.RUN:
                check(request)
        except Exception as error:
            if state is LineState.RUN:
                is_done = isinstance(error, LineError) and number in refused
                state = LineState.DONE_FAILED if is_done else LineState.BAD
                survey.note_problem(number, error)
        survey.states.append(state)
    _mark_repeated(survey, ids, numbers, refused)
    _mark_done(survey, ids, numbers, earlier)
    if (num_more := survey.problems.total() - MAX_REPORTED) > 0:
        logger.warning("%d more lines are bad", num_more)
    logger.info("checked %s lines in %.1f s", f"{len(survey.states):,}", time.monotonic() - started_s)
    return survey


def _mark_repeated(survey: Survey, ids: CustomIds, numbers: array[int], refused: frozenset[int]) -> None:
    for position, first in sorted(zip(*(found.tolist() for found in ids.repeated()), strict=True)):
        number = numbers[position]
        survey.first_lines[number] = numbers[first]
        if survey.states[number - 1] != LineState.ELSEWHERE:
            survey.states[number - 1] = LineState.DONE_FAILED if number in refused else LineState.REPEATED
            survey.note_problem(number, repeated_line(number, numbers[first]))


def _mark_done(survey: Survey, ids: CustomIds, numbers: array[int], earlier: EarlierResults) -> None:
    """Mark requests that have a result; a bad request has one too if an earlier run refused it."""
    states = np.frombuffer(survey.states, dtype=np.uint8)
    positions = ids.positions_in(earlier.answered)
    lines, failed = np.frombuffer(numbers, dtype=np.int64), np.frombuffer(bytes(earlier.failed), dtype=np.uint8)
    found = positions >= 0
    places, positions = lines[found] - 1, positions[found]
    survey.num_foreign = len(earlier.answered) - len(np.unique(positions))
    is_open = np.isin(states[places], (LineState.RUN, LineState.BAD))
    states[places[is_open]] = np.where(failed[positions[is_open]], LineState.DONE_FAILED, LineState.DONE)
