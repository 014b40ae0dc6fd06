"""The slots of the disk tier: which hold what, and whether the content is above, in the pool or on the host, too.

States of a slot::

             take(), attach()           end()                      sink(): the content leaves the tiers above
      free -------------------> lent --------------> shadow ---------------------------------------> sole copy
       ^                        ^  |                    ^                                               |
       |   forgotten meanwhile  |  |                    +---------- end() -------- lent <---------------+
       +------------------------+--+                                              raise_(): it is read
       |
       +------- the oldest sole copy, when slots run out; then the oldest shadow

Sole copies are queued in the order in which the tiers above gave them up, so that all tiers together are one queue.  A
shadow is what a later start finds of a block that is above now.  A slot that is lent is being read or written.
"""

import numpy as np

from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.lru_queue import BlockIds, LruQueue

NO_COPY = -1
_NOT_ABOVE = -1


class DiskSlots:
    """Owner of slots 0 to ``num_slots - 1``; ids below ``num_above`` are blocks of the pool and slots of the host."""

    def __init__(self, num_above: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.copy_of: BlockIds = np.full(num_above, NO_COPY, dtype=np.intp)
        self.above: BlockIds = np.full(num_slots, _NOT_ABOVE, dtype=np.intp)
        self.serials = np.zeros(num_slots, dtype=np.int64)
        self._is_lent: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._free: BlockIds = np.arange(num_slots - 1, -1, -1)  # the first ``_num_free``, last on top
        self._num_free = num_slots
        self._soles = LruQueue(num_slots)
        self._shadows = LruQueue(num_slots)

    @property
    def num_used(self) -> int:
        """Slots that hold something, or are being read or written."""
        return self.num_slots - self._num_free

    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots for new content; these, and those among them that were sole copies."""
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        taken = self._free[self._num_free : self._num_free + from_free][::-1].copy()
        lost = self._soles.pop(min(count - from_free, len(self._soles)))
        shadows = self._shadows.pop(min(count - from_free - len(lost), len(self._shadows)))
        self.copy_of[self.above[shadows]] = NO_COPY
        self.above[shadows] = _NOT_ABOVE
        return np.concatenate((taken, lost, shadows)), lost

    def attach(self, ids: BlockIds, slots: BlockIds, serials: BlockIds) -> None:
        """Note that the content of ``ids`` is being written to these taken slots."""
        self.copy_of[ids], self.above[slots] = slots, ids
        self.serials[slots] = serials
        self._is_lent[slots] = True

    def put(self, slots: BlockIds, serials: BlockIds) -> None:
        """Note that these slots hold sole copies since an earlier start; the first will be lost first."""
        is_put = np.zeros(self.num_slots, dtype=np.bool_)
        is_put[slots] = True
        free = self._free[: self._num_free]
        kept = free[~is_put[free]]
        self._num_free = len(kept)
        self._free[: self._num_free] = kept
        self.serials[slots] = serials
        self._soles.append(slots)

    def raise_(self, slots: BlockIds, ids: BlockIds) -> None:
        """Note that the content of these sole copies is being read, and ``ids`` stand for it."""
        self._soles.remove(slots)
        self.copy_of[ids], self.above[slots] = slots, ids
        self._is_lent[slots] = True

    def end(self, slots: BlockIds) -> None:
        """Note that these slots are not read or written any more."""
        self._is_lent[slots] = False
        is_above = self.above[slots] != _NOT_ABOVE
        self._shadows.append(slots[is_above])
        self._give_back(slots[~is_above])

    def move(self, old: BlockIds, new: BlockIds) -> None:
        """Note that the content of each id ``old`` is that of ``new`` now."""
        copies = self.copy_of[old]
        self.copy_of[old] = NO_COPY
        self.copy_of[new] = copies
        there = copies != NO_COPY
        self.above[copies[there]] = new[there]

    def sink(self, ids: BlockIds) -> BlockIds:
        """Return the content of ``ids``, which have copies that are not lent, is on disk alone; the slots."""
        slots = self.copy_of[ids]
        self._shadows.remove(slots)
        self.copy_of[ids], self.above[slots] = NO_COPY, _NOT_ABOVE
        self._soles.append(slots)
        return slots

    def forget(self, ids: BlockIds) -> None:
        """Note that the content of these ids is of no use, whether they have copies or not."""
        slots = self.copy_of[ids]
        slots = slots[slots != NO_COPY]
        self.copy_of[ids], self.above[slots] = NO_COPY, _NOT_ABOVE
        queued = slots[~self._is_lent[slots]]
        self._shadows.remove(queued)
        self._give_back(queued)

    def clear(self) -> None:
        """Forget all: no content is of use."""
        self.forget(np.flatnonzero(self.copy_of != NO_COPY))
        self._give_back(self._soles.pop(len(self._soles)))

    def are_lent(self, slots: BlockIds) -> BoolArray:
        """Return which of these are being read or written."""
        lent: BoolArray = self._is_lent[slots]
        return lent

    def soles(self) -> BlockIds:
        """Return the sole copies, oldest first."""
        return self._soles.order()

    def contents(self) -> tuple[BlockIds, BlockIds]:
        """Return the slots that are written whole, and what stands for their content: an id above, or -1."""
        slots = np.concatenate((self._soles.order(), self._shadows.order()))
        return slots, self.above[slots]

    def check_integrity(self) -> None:
        """Assert that each slot is in one state, and that slots and ids name each other."""
        ids = np.flatnonzero(self.copy_of != NO_COPY)
        slots = self.copy_of[ids]
        assert np.array_equal(self.above[slots], ids)
        assert np.count_nonzero(self.above != _NOT_ABOVE) == len(ids)
        shadows, soles = self._shadows.order(), self._soles.order()
        assert set(shadows.tolist()) == set(slots[~self._is_lent[slots]].tolist())
        assert (self.above[soles] == _NOT_ABOVE).all()
        lent = np.flatnonzero(self._is_lent)
        states = [*self._free[: self._num_free].tolist(), *shadows.tolist(), *soles.tolist(), *lent.tolist()]
        assert sorted(states) == list(range(self.num_slots)), "a slot is lost, or in two states"

    def _give_back(self, slots: BlockIds) -> None:
        end = self._num_free + len(slots)
        self._free[self._num_free : end] = slots
        self._num_free = end
