"""The slots of the host tier and of the disk tier, each of which has room for one block of the pool.

States of a slot, and on the right the methods of the disk tier where they have names of their own::

              take()                       part(): what is above is needed
      free ----------> double of a block ------------------------------------> sole copy
       ^                |           ^                                             |
       |  reclaimed     |           |  unpin(): the load has gone out             |  pin(): a row needs it
       +----------------+           +------------ pinned, with its block <--------+         raise_(): it is read
       |                                                                          |
       +------------------------- the oldest, when slots run out -----------------+

On the host a block that has a double is *clean*: the pool may take it at once, and nothing is lost.  Sole copies are
queued in the order in which the tiers above gave their blocks up, so that all tiers together are one queue.  Doubles of
blocks that the pool is not about to take are given up before any sole copy.  On disk a double is what a later start
finds of a block that is above now, in the pool or on the host, and the sole copies go first.

A slot of any state may be *lent*: the disk reads or writes it at its own pace.  It can not be taken as long, and enters
the queue of its state when it is given back.
"""

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.lru_queue import BlockIds, LruQueue

NO_SLOT = -1
NO_ID = -1
_RECLAIMED_SHARE = 16  # of all slots at once, because finding doubles takes as long for one as for many
_FREE, _TAKEN, _DOUBLE, _PINNED, _SOLE = range(5)


class TierSlots:
    """Owner of slots 0 to ``num_slots - 1`` below ``num_above`` ids; all methods take and give arrays of slots or of
    these ids.  ``slot_of`` each id is the slot with its double, and ``id_of`` each slot the id."""

    def __init__(self, num_above: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_of: BlockIds = np.full(num_above, NO_SLOT, dtype=np.intp)
        self.id_of: BlockIds = np.full(num_slots, NO_ID, dtype=np.intp)
        self._state: npt.NDArray[np.uint8] = np.zeros(num_slots, dtype=np.uint8)
        self._is_lent: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._free: BlockIds = np.arange(num_slots - 1, -1, -1)  # the first ``_num_free``, last on top
        self._num_free = num_slots
        self._doubles = LruQueue(num_slots)
        self._soles = LruQueue(num_slots)

    @property
    def num_used(self) -> int:
        """Slots that hold something, or are being read or written."""
        return self.num_slots - self._num_free

    def _take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots that are free or sole copies; these, and those among them that were sole copies."""
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        taken = self._free[self._num_free : self._num_free + from_free][::-1].copy()
        lost = self._soles.pop(min(count - from_free, len(self._soles)))
        if len(lost):
            taken = np.concatenate((taken, lost))
        self._state[taken] = _TAKEN
        return taken, lost

    def pair(self, blocks: BlockIds, slots: BlockIds) -> None:
        """Note that the content of each block is, or will be, in a taken slot too."""
        self._enter(slots, _DOUBLE)
        self.slot_of[blocks] = slots
        self.id_of[slots] = blocks

    def part(self, blocks: BlockIds) -> BlockIds:
        """Clean blocks and their slots do not belong together any more; these slots, which are taken."""
        slots = self.slot_of[blocks]
        self._leave(slots, self._doubles)
        self.slot_of[blocks] = NO_SLOT
        self.id_of[slots] = NO_ID
        return slots

    def add_soles(self, slots: BlockIds) -> None:
        """Note that the content of blocks that the pool takes is, or will be, in these taken slots alone."""
        self._enter(slots, _SOLE)

    def forget(self, blocks: BlockIds) -> None:
        """Note that the content of these blocks is of no use: the slots of those that are clean are free."""
        self._enter(self.part(blocks[self.slot_of[blocks] != NO_SLOT]), _FREE)

    def forget_soles(self, slots: BlockIds) -> None:
        """Note that the content of these sole copies is of no use: they are free."""
        self._leave(slots, self._soles)
        self._enter(slots, _FREE)

    def lend(self, slots: BlockIds) -> None:
        """Note that the disk tier uses these slots."""
        for queue in (self._doubles, self._soles):
            queue.remove(slots[queue.holds(slots)])
        self._is_lent[slots] = True

    def give_back(self, slots: BlockIds) -> None:
        """Note that the disk tier does not use these slots any more, whatever has become of them."""
        self._is_lent[slots] = False
        for state in (_FREE, _DOUBLE, _SOLE):
            self._enter(slots[self._state[slots] == state], state)

    def are_lent(self, slots: BlockIds) -> BoolArray:
        """Return which of these are being read or written."""
        lent: BoolArray = self._is_lent[slots]
        return lent

    def clear(self) -> None:
        """Free all slots; those that are lent when they come back."""
        self.forget(np.flatnonzero(self.slot_of != NO_SLOT))
        self.forget_soles(np.flatnonzero(self._state == _SOLE))

    def soles(self) -> BlockIds:
        """Return the sole copies, oldest first, then those that are lent."""
        lent = np.flatnonzero((self._state == _SOLE) & self._is_lent)
        return np.concatenate((self._soles.order(), lent))

    def check_integrity(self) -> None:
        """Assert that each slot is in one state and its queue, and that slots and blocks name each other."""
        blocks = np.flatnonzero(self.slot_of != NO_SLOT)
        paired = self.slot_of[blocks]
        assert np.array_equal(self.id_of[paired], blocks)
        assert np.count_nonzero(self.id_of != NO_ID) == len(blocks)
        assert set(paired.tolist()) == set(np.flatnonzero(np.isin(self._state, (_DOUBLE, _PINNED))).tolist())
        assert not (self._state == _TAKEN).any(), "a slot is lost"
        for state, members in (
            (_FREE, self._free[: self._num_free]),
            (_DOUBLE, self._doubles.order()),
            (_SOLE, self._soles.order()),
        ):
            expected = np.flatnonzero((self._state == state) & ~self._is_lent).tolist()
            assert sorted(members.tolist()) == expected, "a slot is lost, or in two states"

    def _enter(self, slots: BlockIds, state: int) -> None:
        """These slots are in ``state`` from now on, and in its queue unless they are lent."""
        self._state[slots] = state
        slots = slots[~self._is_lent[slots]]
        if state == _DOUBLE:
            self._doubles.append(slots)
        elif state == _SOLE:
            self._soles.append(slots)
        else:
            end = self._num_free + len(slots)
            self._free[self._num_free : end] = slots
            self._num_free = end

    def _leave(self, slots: BlockIds, queue: LruQueue) -> None:
        """Those of these slots that are in ``queue`` leave it."""
        queue.remove(slots[queue.holds(slots)])
        self._state[slots] = _TAKEN


class HostSlots(TierSlots):
    """The host tier's; the ids above are the pool's blocks."""

    @property
    def num_to_spare(self) -> int:
        """Slots that can be taken without the loss of a sole copy."""
        return self._num_free + len(self._doubles)

    def take(self, count: int, next_taken: BlockIds) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots for new content; these, and those among them that were sole copies.  Doubles of
        ``next_taken``, the blocks that the pool takes next, are left alone."""
        if count > self._num_free and len(self._doubles):
            self._reclaim(count - self._num_free, next_taken)
        return self._take(count)

    def drop(self, slots: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Return the content of these slots, none of them pinned, is of no use: they are free.  Returns the blocks
        whose doubles they were, and those of the slots that were sole copies."""
        blocks, soles = self.id_of[slots], slots[self._state[slots] == _SOLE]
        blocks = blocks[blocks != NO_ID]
        self.forget(blocks)
        self.forget_soles(soles)
        return blocks, soles

    def pin(self, slots: BlockIds) -> None:
        """Note that these sole copies will be loaded, and must stay until then."""
        self._leave(slots, self._soles)
        self._state[slots] = _PINNED

    def pair_pinned(self, blocks: BlockIds, slots: BlockIds) -> None:
        """Note that each block will get the content of a pinned slot."""
        self.slot_of[blocks] = slots
        self.id_of[slots] = blocks

    def unpin(self, blocks: BlockIds) -> None:
        """Note that the loads into these blocks have gone out: their slots are doubles."""
        self._enter(self.slot_of[blocks], _DOUBLE)

    def touch(self, slots: BlockIds) -> None:
        """Note that these sole copies will be needed: they are the newest ones."""
        queued = slots[self._soles.holds(slots)]
        self._soles.remove(queued)
        self._soles.append(queued)

    def oldest_soles(self, count: int) -> BlockIds:
        """Return the first ``count`` sole copies that will be lost."""
        return self._soles.peek(count)

    def _reclaim(self, count: int, next_taken: BlockIds) -> None:
        """Free ``count`` doubles or more, the latest first, but none of ``next_taken``."""
        slots = self._doubles.order()
        is_next: npt.NDArray[np.bool_] = np.zeros(len(self.slot_of), dtype=np.bool_)
        is_next[next_taken] = True
        blocks = self.id_of[slots]
        count = max(count, self.num_slots // _RECLAIMED_SHARE)
        self.forget(blocks[~is_next[blocks]][-count:])


class DiskSlots(TierSlots):
    """The disk tier's; the ids above are the pool's blocks, then the host's slots.  ``serials`` are those of the last
    writes."""

    def __init__(self, num_above: int, num_slots: int) -> None:
        super().__init__(num_above, num_slots)
        self.serials = np.zeros(num_slots, dtype=np.int64)

    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots for new content; these, and those among them that were sole copies."""
        taken, lost = self._take(count)
        doubles = self._doubles.peek(count - len(taken))
        self.part(self.id_of[doubles])
        return np.concatenate((taken, doubles)), lost

    def attach(self, ids: BlockIds, slots: BlockIds, serials: BlockIds) -> None:
        """Note that the content of ``ids`` is being written to these taken slots."""
        self.serials[slots] = serials
        self.raise_(slots, ids)

    def raise_(self, slots: BlockIds, ids: BlockIds) -> None:
        """Note that the content of these sole copies is being read, and ``ids`` stand for it."""
        self.lend(slots)
        self.pair(ids, slots)

    def put(self, slots: BlockIds, serials: BlockIds) -> None:
        """Note that these slots hold sole copies since an earlier start; the first will be lost first."""
        free = self._free[: self._num_free]
        kept = free[~np.isin(free, slots)]
        self._num_free = len(kept)
        self._free[: self._num_free] = kept
        self.serials[slots] = serials
        self.add_soles(slots)

    def move(self, old: BlockIds, new: BlockIds) -> None:
        """Note that the content of each id ``old`` is that of ``new`` now."""
        slots = self.slot_of[old]
        self.slot_of[old] = NO_SLOT
        self.slot_of[new] = slots
        there = slots != NO_SLOT
        self.id_of[slots[there]] = new[there]

    def contents(self) -> tuple[BlockIds, BlockIds]:
        """Return the slots that are written whole, and what stands for their content: an id above, or -1."""
        slots = np.concatenate((self._soles.order(), self._doubles.order()))
        return slots, self.id_of[slots]
