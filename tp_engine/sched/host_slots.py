"""The slots of the host tier, each of which has room for one block of the pool.

States of a slot::

              take()                       leave(): the pool needs the block
      free ----------> double of a block ------------------------------------> sole copy
       ^                |           ^                                             |
       |  reclaimed     |           |  unpin(): the load has gone out             |  pin(): a row needs it
       +----------------+           +------------ pinned, with its block <--------+
       |                                                                          |
       +------------------------- the oldest, when slots run out -----------------+

A block that has a double is *clean*: the pool may take it at once, and nothing is lost.  Sole copies are queued in the
order in which the pool gave their blocks up, so that pool and slots together are one queue.  Doubles of blocks that the
pool is not about to take are given up before any sole copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tp_engine.sched.lru_queue import NO_BLOCKS, BlockIds, LruQueue

NO_SLOT = -1
_NO_BLOCK = -1
_RECLAIMED_SHARE = 16  # of all slots at once, because finding doubles takes as long for one as for many


class HostSlots:
    """Owner of slots 0 to ``num_slots - 1``; all methods take and give arrays of slots or of the pool's blocks."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_of: BlockIds = np.full(num_blocks, NO_SLOT, dtype=np.intp)
        self._block_of: BlockIds = np.full(num_slots, _NO_BLOCK, dtype=np.intp)
        self._free: BlockIds = np.arange(num_slots - 1, -1, -1)  # the first ``_num_free``, last on top
        self._num_free = num_slots
        self._doubles = LruQueue(num_slots)
        self._soles = LruQueue(num_slots)

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return self.num_slots - self._num_free

    def take(self, count: int, next_taken: BlockIds) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots for new content; these, and those among them that were sole copies.

        Doubles of ``next_taken``, the blocks that the pool takes next, are left alone.
        """
        if count > self._num_free and len(self._doubles):
            self._reclaim(count - self._num_free, next_taken)
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        taken = self._free[self._num_free : self._num_free + from_free][::-1].copy()
        lost = self._soles.pop(min(count - from_free, len(self._soles)))
        return (np.concatenate((taken, lost)), lost) if len(lost) else (taken, NO_BLOCKS)

    def pair(self, blocks: BlockIds, slots: BlockIds) -> None:
        """The content of each block is, or will be, in a taken slot too."""
        self._doubles.append(slots)
        self.slot_of[blocks] = slots
        self._block_of[slots] = blocks

    def part(self, blocks: BlockIds) -> BlockIds:
        """Clean blocks and their slots do not belong together any more; these slots, which are taken."""
        slots = self.slot_of[blocks]
        self._doubles.remove(slots[self._doubles.holds(slots)])
        self.slot_of[blocks] = NO_SLOT
        self._block_of[slots] = _NO_BLOCK
        return slots

    def add_soles(self, slots: BlockIds) -> None:
        """The content of blocks that the pool takes is, or will be, in these taken slots alone."""
        self._soles.append(slots)

    def forget(self, blocks: BlockIds) -> None:
        """The content of these clean blocks is of no use: their slots are free."""
        self._give_back(self.part(blocks))

    def pin(self, slots: BlockIds) -> None:
        """These sole copies will be loaded, and must stay until then."""
        self._soles.remove(slots)

    def pair_pinned(self, blocks: BlockIds, slots: BlockIds) -> None:
        """Each block will get the content of a pinned slot."""
        self.slot_of[blocks] = slots
        self._block_of[slots] = blocks

    def unpin(self, blocks: BlockIds) -> None:
        """The loads into these blocks have gone out: their slots are doubles."""
        self._doubles.append(self.slot_of[blocks])

    def clear(self) -> None:
        """All slots are free."""
        blocks = np.flatnonzero(self.slot_of != NO_SLOT)
        self.forget(blocks)
        self._give_back(self._soles.pop(len(self._soles)))

    def soles(self) -> BlockIds:
        """The sole copies, oldest first."""
        return self._soles.order()

    def check_integrity(self) -> None:
        """Assert that each slot is in one state, and that slots and blocks name each other."""
        blocks = np.flatnonzero(self.slot_of != NO_SLOT)
        paired = self.slot_of[blocks]
        assert np.array_equal(self._block_of[paired], blocks)
        assert np.count_nonzero(self._block_of != _NO_BLOCK) == len(blocks)
        assert set(self._doubles.order().tolist()) <= set(paired.tolist())
        states = [*self._free[: self._num_free].tolist(), *paired.tolist(), *self._soles.order().tolist()]
        assert sorted(states) == list(range(self.num_slots)), "a slot is lost, or in two states"

    def _reclaim(self, count: int, next_taken: BlockIds) -> None:
        """Free ``count`` doubles or more, the latest first, but none of ``next_taken``."""
        slots = self._doubles.order()
        is_next: npt.NDArray[np.bool_] = np.zeros(len(self.slot_of), dtype=np.bool_)
        is_next[next_taken] = True
        blocks = self._block_of[slots]
        count = max(count, self.num_slots // _RECLAIMED_SHARE)
        self.forget(blocks[~is_next[blocks]][-count:])

    def _give_back(self, slots: BlockIds) -> None:
        end = self._num_free + len(slots)
        self._free[self._num_free : end] = slots
        self._num_free = end
