"""Work of the tiers between the plan that orders it and the ranks' reports that it has ended.

It is reads and writes of the disk tier, and stores that ranks may refuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.limits import TierReports

_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class TierBatch:
    """Operations of one plan, ``first`` and those behind it: slots of the disk, or of the host where blocks are stored.

    ``host`` are the slots of the host that reads and writes of the disk use.
    """

    first: int
    host: BlockIds
    slots: BlockIds
    records: bytes = b""

    @property
    def last(self) -> int:
        """The last operation."""
        return self.first + len(self.slots) - 1


class TierChannel:
    """Operations of one kind, numbered from 1 on in the order of the plans.

    ``num_ordered`` have been ordered, of which ``num_ended`` have ended on all ranks, batch by batch; ``num_failed``
    failed on some.
    """

    def __init__(self, reports: TierReports, name: str, clock: Callable[[], float]) -> None:
        self._poll = reports[name]
        self._clock = clock
        self._batches: deque[TierBatch] = deque()
        self._failed: set[int] = set()
        self._last_report = 0
        self._news_s = 0.0
        self.num_ordered = self.num_ended = self.num_failed = 0

    @property
    def num_open(self) -> int:
        """Operations that have not ended everywhere."""
        return self.num_ordered - self.num_ended

    def order(self, host: BlockIds, slots: BlockIds, records: bytes = b"") -> None:
        """Order one more batch; see ``TierBatch``."""
        if not self.num_open:
            self._news_s = self._clock()
        self._batches.append(TierBatch(self.num_ordered + 1, host, slots, records))
        self.num_ordered += len(slots)

    def ended(self) -> list[tuple[TierBatch, BoolArray]]:
        """The batches that have ended since the last call, and which of their operations failed."""
        if not self._batches:
            return []
        report = self._poll()
        self._failed.update(report.failed)
        if report.ended != self._last_report:
            self._last_report, self._news_s = report.ended, self._clock()
        done: list[tuple[TierBatch, BoolArray]] = []
        while self._batches and self._batches[0].last <= report.ended:
            batch = self._batches.popleft()
            self.num_ended = batch.last
            has_failed = np.zeros(len(batch.slots), dtype=np.bool_)
            if self._failed:
                has_failed = np.isin(np.arange(batch.first, batch.last + 1), list(self._failed))
                self._failed = {number for number in self._failed if number > batch.last}
                self.num_failed += int(np.count_nonzero(has_failed))
            done.append((batch, has_failed))
        return done

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has ended for a while although something was ordered."""
        return self.num_open > 0 and self._clock() - self._news_s > _PATIENCE_S
