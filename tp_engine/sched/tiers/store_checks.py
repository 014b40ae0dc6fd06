"""Stores that a rank may refuse: which slots of the host tier have content that every rank has confirmed.

A codec with a bound (worker/codecs/pca.py) finds only while it encodes a block whether the block is within it, and each
rank has heads of its own.  So ranks report all stores in the channel ``stores`` (``tier_progress``), numbered by their
place in the plans, and a slot is used only after all ranks have confirmed it::

    plan 7    stores (5, 0) (9, 1) (2, 2)         numbers 21 22 23
    ranks     ended 23, ended 23                  failed 22 on one of them: slots 0 and 2 are sure, slot 1 is given up

A block that was refused stays in the pool as before, and is not stored again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray, IntArray
from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds
from tp_engine.sched.limits import TierReports
from tp_engine.sched.tiers.tier_channel import TierChannel

_NO_NUMBER = 0


class StoreChecks:
    """What is known of each slot's last store; ``refused`` are blocks of the pool whose content can not be stored."""

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
        """The plan in the making stores into these slots."""
        self._is_sure[slots] = False
        self._number_of[slots] = _NO_NUMBER

    def order(self, stores: IntArray) -> None:
        """These stores (n, 2), at least one, go out with the plan."""
        slots = stores[:, 1].astype(np.intp)
        first = self._channel.num_ordered + 1
        self._number_of[slots] = np.arange(first, first + len(slots))
        self._channel.order(NO_BLOCKS, slots)

    def are_sure(self, slots: BlockIds) -> BoolArray:
        """Which slots all ranks have confirmed."""
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
        """All content of pool and slots is forgotten; stores that have gone out may still run."""
        self.refused[:] = False
        self._is_sure[:] = False
        self._number_of[:] = _NO_NUMBER
