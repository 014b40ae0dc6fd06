"""The outcomes of lines: put into order, written, counted and shown as progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from tqdm import tqdm

from tp_engine.api.batch_job.lines import BatchRequest, ResultLine
from tp_engine.api.batch_job.results import Results
from tp_engine.api.batch_job.summary import Tally
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.log import get_logger
from tp_engine.outputs import RequestOutput

logger = get_logger(__name__)

_LOG_PERIOD_S = 30.0
_RATE_PERIOD_S = 2.0

Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class Work:
    """One open line, the ``ordinal``-th of the job: a ``request``, prepared, or already its ``result``.

    ``num_bytes`` is the length of the line, and what the pixels of its images take.  ``outputs`` are what an answer was
    made of.
    """

    ordinal: int
    num_bytes: int
    request: BatchRequest | None = None
    prepared: PreparedBody | None = None
    result: ResultLine | None = None
    outputs: Sequence[RequestOutput] = ()


class ResultOrder(Generic[Result]):
    """Passes results, numbered from 0, to ``write``: as they come, or, with ``keeps_order``, in order of number.

    To keep the order it holds results back; ``has_room`` lets a number start only if it is less than ``window`` ahead
    of the first one that is missing.
    """

    def __init__(self, write: Callable[[Result], None], *, keeps_order: bool, window: int) -> None:
        self._write = write
        self._keeps_order = keeps_order
        self._window = window
        self._held: dict[int, Result] = {}
        self._next = 0

    def has_room(self, ordinal: int) -> bool:
        """Return whether the work with this number may start."""
        return not self._keeps_order or ordinal - self._next < self._window

    def put(self, ordinal: int, result: Result) -> None:
        """Take the result with this number."""
        if not self._keeps_order:
            self._write(result)
            return
        self._held[ordinal] = result
        while self._next in self._held:
            self._write(self._held.pop(self._next))
            self._next += 1


class Outcomes(ResultOrder[Work]):
    """Orders, writes and counts outcomes.  ``tally`` counts written lines; lines that are held back are not done."""

    def __init__(self, results: Results, progress: Progress, *, keeps_order: bool, window: int) -> None:
        super().__init__(self._count_and_write, keeps_order=keeps_order, window=window)
        self.tally = Tally()
        self._progress = progress
        self._results = results

    def step(self, num_tokens: int) -> None:
        """Note that the engine has made a step and generated ``num_tokens``."""
        self._progress.tokens(num_tokens)
        self._results.sync_if_due()

    def _count_and_write(self, work: Work) -> None:
        assert work.result is not None
        self._results.write(work.result)
        if work.result.error is None:
            self.tally.succeeded(work.outputs)
        else:
            self.tally.failed(work.result.error["code"] or "invalid_request")
        self._progress.line()


class Progress:
    """Shows the progress of a job as a bar on a terminal, otherwise as lines in the log.

    Earlier runs have done ``initial`` of the ``total`` lines.  The rate is that of the last few seconds.
    """

    def __init__(self, total: int, initial: int, *, shown: bool) -> None:
        self._total, self._initial, self._shown = total, initial, shown
        self._num_done = 0
        self._num_tokens = self._num_tokens_before = 0
        self._started_s = self._rated_s = self._logged_s = time.monotonic()
        self._rate = 0.0
        on_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=initial, desc="lines", unit="line", disable=not on_terminal, dynamic_ncols=True
        )

    def tokens(self, number: int) -> None:
        """Note that one step generated ``number`` tokens."""
        self._num_tokens += number
        now_s = time.monotonic()
        if now_s - self._rated_s >= _RATE_PERIOD_S:
            self._rate = (self._num_tokens - self._num_tokens_before) / (now_s - self._rated_s)
            self._num_tokens_before, self._rated_s = self._num_tokens, now_s
            self._bar.set_postfix_str(f"{self._rate:,.0f} tokens/s")
            if self._shown and self._bar.disable and now_s - self._logged_s >= _LOG_PERIOD_S:
                self._logged_s = now_s
                logger.info("%s", self.text(now_s))

    def line(self) -> None:
        """Note that one more line has its result."""
        self._num_done += 1
        self._bar.update(1)

    def text(self, now_s: float) -> str:
        """Return one line for the log; ``now_s`` is time.monotonic()."""
        done = self._initial + self._num_done
        share = 100 * done / self._total if self._total else 100.0
        left_s = (now_s - self._started_s) * (self._total - done) / self._num_done if self._num_done else None
        left = "" if left_s is None else f", {timedelta(seconds=round(left_s))} left"
        return f"{done:,} of {self._total:,} lines ({share:.1f} %), {self._rate:,.0f} tokens/s{left}"

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
