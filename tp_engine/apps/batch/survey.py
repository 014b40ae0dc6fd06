"""The first pass over the input: it checks every line, and notes which ones the second pass must answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tp_engine.api.batch_file.endpoints import ENDPOINTS
from tp_engine.api.batch_file.lines import BatchInput, BatchRequest, LineError, read_line, repeated_line
from tp_engine.api.batch_file.results import EarlierResults, digest
from tp_engine.api.openai.errors import describe_error
from tp_engine.apps.batch.config import takes_line
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

MAX_REPORTED = 100
_STOP_CHECK_LINES = 256

CheckRequest: TypeAlias = Callable[[BatchRequest], object]


@dataclass(slots=True, kw_only=True)
class Survey:
    """What is known of a shard's lines, except blank ones.

    ``is_open[n - 1]`` is 1 if line n lacks its result, an answer or an error; ``num_runnable`` of the open lines can
    run.  ``first_lines``: the number of a line that repeats a ``custom_id`` -> that of the first line that has it.
    ``problems`` counts by code what is wrong with open lines.  ``num_foreign`` results of earlier runs belong to no
    line.
    """

    is_open: bytearray = field(default_factory=bytearray)
    first_lines: dict[int, int] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    num_lines: int = 0
    num_runnable: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_foreign: int = 0

    def note(self, number: int, *, failed: bool | None, problem: Exception | None) -> None:
        """Count a line: ``failed`` says whether its earlier result is an error; None if it has none."""
        self.num_lines += 1
        self.num_answered += failed is False
        self.num_failed += failed is True
        if failed is not None:
            return
        self.is_open[number - 1] = 1
        if problem is None:
            self.num_runnable += 1
            return
        if self.problems.total() < MAX_REPORTED:
            logger.warning("line %d: %s", number, str(problem).removeprefix(f"line {number} "))
        code = getattr(problem, "code", None) or describe_error(problem)[1]["error"]["code"] or "invalid_request"
        self.problems[code] += 1


def survey_lines(
    source: BatchInput,
    earlier: EarlierResults,
    shard: tuple[int, int],
    check: CheckRequest,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Survey | None:
    """Read the whole input once; ``check`` raises ``RequestError`` for a request that cannot be served.

    ``shard`` is ``BatchConfig.input_shard``.  Logs the numbers of lines that are bad or repeat another.  None if a stop
    was requested before the end.
    """
    started_s = time.monotonic()
    survey, numbers, num_known = Survey(), dict[bytes, int](), 0
    for number, text in source.lines():
        if number % _STOP_CHECK_LINES == 0 and stop_requested():
            return None
        survey.is_open.extend(bytes(number - len(survey.is_open)))  # ``lines`` skips blank ones
        is_ours, failed, problem = takes_line(shard, number), None, None
        try:
            request = read_line(number, text, ENDPOINTS)
            key = digest(request.custom_id)
            if (first := numbers.setdefault(key, number)) != number:
                survey.first_lines[number] = first
                raise repeated_line(number, first)
            failed = earlier.answered.get(key)
            num_known += failed is not None
            if is_ours and failed is None:
                check(request)
        except Exception as error:
            problem, failed = error, True if isinstance(error, LineError) and number in earlier.refused else None
        if is_ours:
            survey.note(number, failed=failed, problem=problem)
    survey.num_foreign = len(earlier.answered) - num_known
    if (num_more := survey.problems.total() - MAX_REPORTED) > 0:
        logger.warning("%d more lines are bad", num_more)
    logger.info("checked %s lines in %.1f s", f"{len(survey.is_open):,}", time.monotonic() - started_s)
    return survey
