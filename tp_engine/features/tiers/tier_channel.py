"""Work of the tiers between the plan that orders it and the ranks' reports that it has ended: reads and writes of the
disk tier, and stores that ranks may refuse.

A codec with a bound (codecs/pca.py) finds only while it encodes a block whether the block is within it, and each
rank has heads of its own.  So ranks report all stores in the channel ``stores`` (``tier_progress``), numbered by their
place in the plans, and a slot is used only after all ranks have confirmed it::

    plan 7    stores (5, 0) (9, 1) (2, 2)         numbers 21 22 23
    ranks     ended 23, ended 23                  failed 22 on one of them: slots 0 and 2 are sure, slot 1 is given up

A block that was refused stays in the pool as before, and is not stored again.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.job.tier_progress import TierReport
from tp_engine.plan import BoolArray, IntArray
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds

_PATIENCE_S = 3.0

TierReports: TypeAlias = Mapping[str, Callable[[], TierReport]]
"""What asks for the news of the tiers' work, by the name of its channel."""

NO_REPORTS: TierReports = MappingProxyType({})
_NO_NUMBER = 0


@dataclass(frozen=True, slots=True)
class TierBatch:
    """Operations of one plan, ``first`` and those after it: slots of the disk, or of the host where blocks are stored.
    ``host`` are the slots of the host that reads and writes of the disk use."""

    first: int
    host: BlockIds
    slots: BlockIds
    records: bytes = b""

    @property
    def last(self) -> int:
        """The last operation."""
        return self.first + len(self.slots) - 1


class TierChannel:
    """Operations of one kind, numbered from 1 on in the order of the plans.  ``num_ordered`` have been ordered, of
    which ``num_ended`` have ended on all ranks, batch by batch; ``num_failed`` failed on some."""

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
        """Return the batches that have ended since the last call, and which of their operations failed."""
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


class StoreChecks:
    """What is known of each slot's last store; ``refused`` are blocks of the pool whose content cannot be stored."""

    def __init__(self, num_blocks: int, num_slots: int, reports: TierReports) -> None:
        self.refused: BoolArray = np.zeros(num_blocks, dtype=np.bool_)
        self._channel = TierChannel(reports, "stores", lambda: 0.0)
        self._is_sure: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._number_of: npt.NDArray[np.int64] = np.full(num_slots, _NO_NUMBER, dtype=np.int64)

    @property
    def num_refused(self) -> int:
        """Stores that some rank has refused."""
        return self._channel.num_failed

    def begin(self, slots: BlockIds) -> None:
        """Count these slots as unsure: the plan in the making stores into them."""
        self._is_sure[slots] = False
        self._number_of[slots] = _NO_NUMBER

    def order(self, stores: IntArray) -> None:
        """Number these stores (n, 2), at least one, which go out with the plan."""
        slots = stores[:, 1].astype(np.intp)
        first = self._channel.num_ordered + 1
        self._number_of[slots] = np.arange(first, first + len(slots))
        self._channel.order(NO_BLOCKS, slots)

    def are_sure(self, slots: BlockIds) -> BoolArray:
        """Return which slots all ranks have confirmed."""
        sure: BoolArray = self._is_sure[slots]
        return sure

    def settle(self) -> BlockIds:
        """Take the ranks' news; the slots whose content some rank has refused."""
        refused = [NO_BLOCKS]
        for batch, has_failed in self._channel.ended():
            numbers = np.arange(batch.first, batch.last + 1)
            is_last = self._number_of[batch.slots] == numbers  # else another store has gone into the slot since
            self._is_sure[batch.slots[is_last & ~has_failed]] = True
            refused.append(batch.slots[is_last & has_failed])
        return np.concatenate(refused)

    def clear(self) -> None:
        """Forget all content of pool and slots; stores that have gone out may still run."""
        self.refused[:] = False
        self._is_sure[:] = False
        self._number_of[:] = _NO_NUMBER
