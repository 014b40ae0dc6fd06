"""The first pass over the input: every line is checked before anything runs, and what is to be done is written down.

::

    state of a line     what the second pass does with it
    BLANK, ELSEWHERE    nothing: it is empty, or another shard's
    DONE, DONE_FAILED   nothing: an earlier run wrote its result, an answer or an error
    RUN                 runs it
    BAD                 writes an error: it is no request, or one that can not be served
    REPEATED            writes an error: an earlier line has its custom_id

One byte is kept per line, and while the survey lasts about 40 more.
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
import numpy.typing as npt

from tp_engine.api.batch_job.config import InputShard
from tp_engine.api.batch_job.endpoints import ENDPOINTS
from tp_engine.api.batch_job.lines import BatchRequest, LineError, problem_code, read_line, repeated_line
from tp_engine.api.batch_job.results import CustomIds, EarlierResults
from tp_engine.api.batch_job.source import Source
from tp_engine.log import get_logger

logger = get_logger(__name__)

MAX_REPORTED = 100
_STOP_CHECK_LINES = 256

CheckRequest: TypeAlias = Callable[[BatchRequest], object]
LineNumbers: TypeAlias = npt.NDArray[np.int64]


class LineState(enum.IntEnum):
    """What is to be done with a line; see above."""

    BLANK = 0
    ELSEWHERE = 1
    DONE = 2
    DONE_FAILED = 3
    RUN = 4
    BAD = 5
    REPEATED = 6


@dataclass(slots=True, kw_only=True)
class Survey:
    """``states`` of all lines, the first one at 0; ``problems`` counts those of this shard's lines by code."""

    states: bytearray = field(default_factory=bytearray)
    problems: Counter[str] = field(default_factory=Counter)
    num_foreign: int = 0
    _repeated: LineNumbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _first: LineNumbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def count(self, *states: LineState) -> int:
        """Number of lines in any of ``states``."""
        return sum(self.states.count(state) for state in states)

    @property
    def num_requests(self) -> int:
        """Lines of this shard that are not blank."""
        return len(self.states) - self.count(LineState.BLANK, LineState.ELSEWHERE)

    @property
    def num_left(self) -> int:
        """Lines whose results are yet to be written."""
        return self.count(LineState.RUN, LineState.BAD, LineState.REPEATED)

    def first_line(self, number: int) -> int:
        """The line whose ``custom_id`` line ``number``, which is REPEATED, has again."""
        return int(self._first[np.searchsorted(self._repeated, number)])

    def note_repeated(self, repeated: LineNumbers, first: LineNumbers) -> None:
        """Remember the numbers of lines and of the lines that they repeat."""
        order = np.argsort(repeated)
        self._repeated, self._first = repeated[order], first[order]


def survey_lines(
    source: Source,
    earlier: EarlierResults,
    shard: InputShard,
    check: CheckRequest,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Survey | None:
    """Read the whole input once; ``check`` raises ``RequestError`` for a request that can not be served.

    Lines that are bad or repeat another are logged with their numbers.  None if told to stop before the end.
    """
    started_s = time.monotonic()
    survey, ids, numbers, report = Survey(), CustomIds(), array("q"), _Report()
    refused = np.unique(np.frombuffer(earlier.refused_lines, dtype=np.int64))
    for number, text in source.lines():
        survey.states.extend(bytes(number - 1 - len(survey.states)))  # blank lines do not come
        if number % _STOP_CHECK_LINES == 0 and stop_requested():
            return None
        state = LineState.RUN if shard.takes(number) else LineState.ELSEWHERE
        try:
            request = read_line(number, text, ENDPOINTS)
            ids.add(request.custom_id)
            numbers.append(number)
            if state is LineState.RUN:
                check(request)
        except Exception as error:
            if state is LineState.RUN:
                is_done = isinstance(error, LineError) and _is_among(number, refused)
                state = LineState.DONE_FAILED if is_done else LineState.BAD
                report.add(number, error)
        survey.states.append(state)
    _mark_repeated(survey, ids, numbers, refused, report)
    _mark_done(survey, ids, numbers, earlier)
    survey.problems = report.counts
    report.close()
    logger.info("checked %s lines in %.1f s", f"{len(survey.states):,}", time.monotonic() - started_s)
    return survey


def _is_among(number: int, ordered: LineNumbers) -> bool:
    place = np.searchsorted(ordered, number)
    return bool(place < len(ordered) and ordered[place] == number)


def _mark_repeated(survey: Survey, ids: CustomIds, numbers: array[int], refused: LineNumbers, report: _Report) -> None:
    positions, firsts = ids.repeated()
    lines = np.frombuffer(numbers, dtype=np.int64)
    survey.note_repeated(lines[positions], lines[firsts])
    for number in map(int, np.sort(lines[positions])):
        if survey.states[number - 1] != LineState.ELSEWHERE:
            survey.states[number - 1] = LineState.DONE_FAILED if _is_among(number, refused) else LineState.REPEATED
            report.add(number, repeated_line(number, survey.first_line(number)))


def _mark_done(survey: Survey, ids: CustomIds, numbers: array[int], earlier: EarlierResults) -> None:
    """Requests that have a result; a bad one that ran into an error before has one too."""
    states = np.frombuffer(survey.states, dtype=np.uint8)
    positions = ids.positions_in(earlier.answered)
    lines, failed = np.frombuffer(numbers, dtype=np.int64), np.frombuffer(bytes(earlier.failed), dtype=np.uint8)
    found = positions >= 0
    places, positions = lines[found] - 1, positions[found]
    survey.num_foreign = len(earlier.answered) - len(np.unique(positions))
    is_open = np.isin(states[places], (LineState.RUN, LineState.BAD))
    states[places[is_open]] = np.where(failed[positions[is_open]], LineState.DONE_FAILED, LineState.DONE)


class _Report:
    """Problems in the log: the first ones in full, all of them counted by code."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, number: int, error: Exception) -> None:
        if self.counts.total() < MAX_REPORTED:
            logger.warning("line %d: %s", number, str(error).removeprefix(f"line {number} "))
        self.counts[problem_code(error)] += 1

    def close(self) -> None:
        if (num_more := self.counts.total() - MAX_REPORTED) > 0:
            logger.warning("%d more lines are bad", num_more)
