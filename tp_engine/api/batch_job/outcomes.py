"""What became of the lines: put into order, written, counted and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tp_engine.api.batch_job.lines import ResultLine
from tp_engine.api.batch_job.order import ResultOrder
from tp_engine.api.batch_job.progress import Progress
from tp_engine.api.batch_job.results import Results
from tp_engine.api.batch_job.summary import Tally
from tp_engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one line, and what it was made of; an error has no ``outputs``."""

    line: ResultLine
    outputs: Sequence[RequestOutput] = ()


class Outcomes:
    """Takes each line's outcome.  ``tally`` counts what has been written: what is held back is not done."""

    def __init__(self, results: Results, progress: Progress, *, keeps_order: bool, window: int) -> None:
        self.tally = Tally()
        self._progress = progress
        self._results = results
        self._order: ResultOrder[Outcome] = ResultOrder(self._write, keeps_order=keeps_order, window=window)

    def has_room(self, ordinal: int) -> bool:
        """Whether the line with this number may start."""
        return self._order.has_room(ordinal)

    def put(self, ordinal: int, outcome: Outcome) -> None:
        """Take what became of the ``ordinal``-th line."""
        self._order.put(ordinal, outcome)

    def step(self, num_tokens: int) -> None:
        """The engine has made a step and generated ``num_tokens``."""
        self._progress.tokens(num_tokens)
        self._results.sync_if_due()

    def _write(self, outcome: Outcome) -> None:
        self._results.write(outcome.line)
        if outcome.line.error is None:
            self.tally.succeeded(outcome.outputs)
        else:
            self.tally.failed(outcome.line.error["code"] or "invalid_request")
        self._progress.line()
