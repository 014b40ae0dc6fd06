"""The slots of the host tier and of the disk tier, each of which has room for one block of the pool.

States of a slot::

              take()                       part(): what is above is needed
      free ----------> double of a block ------------------------------------> sole copy
       ^                |           ^                                             |
       |   doubles go   |           +---- pair(): it is loaded, or read ----------+
       +----------------+                                                         |
       |                                                                          |
       +------------------------- the oldest, when slots run out -----------------+

On the host a block that has a double is *clean*: the pool may take it at once, and nothing is lost.  Sole copies are
queued in the order in which the tiers above gave their blocks up, so that all tiers together are one queue.  Doubles of
blocks that the pool is not about to take are given up before any sole copy.  On disk a double is what a later start
finds of a block that is above now, in the pool or on the host, and the sole copies go first.

A slot of any state may be *lent*, more than once: the disk reads or writes it at its own pace, or its load has not gone
out.  It cannot be taken as long, and enters the queue of its state when it is given back.
"""

import numpy as np
import numpy.typing as npt

from tp_engine.plan import BoolArray
from tp_engine.sched.blocks.lru_queue import BlockIds, LruQueue

NO_SLOT = -1
NO_ID = -1
_RECLAIMED_SHARE = 16  # of all slots at once, because finding doubles takes as long for one as for many
_FREE, _TAKEN, _DOUBLE, _SOLE = range(4)


class TierSlots:
    """Owner of slots 0 to ``num_slots - 1`` below ``num_above`` ids; all methods take and give arrays of slots or of
    these ids.  ``slot_of`` each id is the slot with its double, and ``id_of`` each slot the id."""

    def __init__(self, num_above: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot_of: BlockIds = np.full(num_above, NO_SLOT, dtype=np.intp)
        self.id_of: BlockIds = np.full(num_slots, NO_ID, dtype=np.intp)
        self._state: npt.NDArray[np.uint8] = np.zeros(num_slots, dtype=np.uint8)
        self._num_lent: npt.NDArray[np.uint8] = np.zeros(num_slots, dtype=np.uint8)
        self._free: BlockIds = np.arange(num_slots - 1, -1, -1)  # the first ``_num_free``, last on top
        self._num_free = num_slots
        self._doubles = LruQueue(num_slots)
        self._soles = LruQueue(num_slots)

    @property
    def num_used(self) -> int:
        """Slots that hold something, or are being read or written."""
        return self.num_slots - self._num_free

    @property
    def num_to_spare(self) -> int:
        """Slots that can be taken without the loss of a sole copy."""
        return self._num_free + len(self._doubles)

    def take(self, count: int, spared: BlockIds | None = None) -> tuple[BlockIds, BlockIds]:
        """At most ``count`` slots for new content; these, and those among them that were sole copies.

        With ``spared`` the doubles of all ids but those are given up first, the latest first; without it doubles go
        after the sole copies, the oldest first."""
        if spared is not None and count > self._num_free and len(self._doubles):
            ids = self.id_of[self._doubles.order()]
            most = max(count - self._num_free, self.num_slots // _RECLAIMED_SHARE)
            self.forget(ids[~np.isin(ids, spared)][-most:])
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        taken = self._free[self._num_free : self._num_free + from_free][::-1].copy()
        lost = self._soles.pop(min(count - from_free, len(self._soles)))
        if len(lost):
            taken = np.concatenate((taken, lost))
        self._state[taken] = _TAKEN
        if spared is None and len(taken) < count:
            doubles = self._doubles.peek(count - len(taken))
            taken = np.concatenate((taken, self.part(self.id_of[doubles])))
        return taken, lost

    def pair(self, ids: BlockIds, slots: BlockIds) -> None:
        """Enter ids whose content is, or will be, in a slot that is taken or lent too."""
        self._enter(slots, _DOUBLE)
        self.slot_of[ids] = slots
        self.id_of[slots] = ids

    def part(self, ids: BlockIds) -> BlockIds:
        """Clean ids and their slots do not belong together any more; these slots, which are taken."""
        slots = self.slot_of[ids]
        self._leave(slots, self._doubles)
        self.slot_of[ids] = NO_SLOT
        self.id_of[slots] = NO_ID
        return slots

    def move(self, old: BlockIds, new: BlockIds) -> None:
        """Move each id ``old`` to ``new``, which has its content now."""
        slots = self.slot_of[old]
        self.slot_of[old] = NO_SLOT
        self.slot_of[new] = slots
        there = slots != NO_SLOT
        self.id_of[slots[there]] = new[there]

    def add_soles(self, slots: BlockIds) -> None:
        """Enter taken slots that alone have, or will have, their content."""
        self._enter(slots, _SOLE)

    def restore(self, slots: BlockIds) -> None:
        """Enter free slots that hold sole copies since an earlier start; the first will be lost first."""
        kept = self._free[~np.isin(self._free, slots)]
        self._num_free = len(kept)
        self._free[: self._num_free] = kept
        self.add_soles(slots)

    def forget(self, ids: BlockIds) -> None:
        """Free the clean slots of these ids, whose content is of no use."""
        self._enter(self.part(ids[self.slot_of[ids] != NO_SLOT]), _FREE)

    def forget_soles(self, slots: BlockIds) -> None:
        """Free these sole copies, whose content is of no use."""
        self._leave(slots, self._soles)
        self._enter(slots, _FREE)

    def drop(self, slots: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Free these slots, whose content is of no use.  Returns the ids whose doubles they were, and the slots that
        were sole copies."""
        ids, soles = self.id_of[slots], slots[self._state[slots] == _SOLE]
        ids = ids[ids != NO_ID]
        self.forget(ids)
        self.forget_soles(soles)
        return ids, soles

    def lend(self, slots: BlockIds) -> None:
        """Lend these slots, distinct: they are used until they are given back as often."""
        for queue in (self._doubles, self._soles):
            queue.remove(slots[queue.holds(slots)])
        self._num_lent[slots] += 1

    def give_back(self, slots: BlockIds) -> None:
        """Take these lent slots, distinct, back, whatever has become of them."""
        self._num_lent[slots] -= 1
        for state in (_FREE, _DOUBLE, _SOLE):
            self._enter(slots[self._state[slots] == state], state)

    def are_lent(self, slots: BlockIds) -> BoolArray:
        """Return which of these are being read or written."""
        lent: BoolArray = self._num_lent[slots] > 0
        return lent

    def touch(self, slots: BlockIds) -> None:
        """Make these sole copies the newest ones, because they will be needed."""
        queued = slots[self._soles.holds(slots)]
        self._soles.remove(queued)
        self._soles.append(queued)

    def oldest_soles(self, count: int) -> BlockIds:
        """Return the first ``count`` sole copies that will be lost."""
        return self._soles.peek(count)

    def clear(self) -> None:
        """Free all slots; those that are lent when they come back."""
        self.forget(np.flatnonzero(self.slot_of != NO_SLOT))
        self.forget_soles(np.flatnonzero(self._state == _SOLE))

    def contents(self) -> BlockIds:
        """Return the slots that are whole, neither free nor lent."""
        return np.concatenate((self._soles.order(), self._doubles.order()))

    def soles(self) -> BlockIds:
        """Return the sole copies, oldest first, then those that are lent."""
        lent = np.flatnonzero((self._state == _SOLE) & (self._num_lent > 0))
        return np.concatenate((self._soles.order(), lent))

    def check_integrity(self) -> None:
        """Assert that each slot is in one state and its queue, and that slots and ids name each other."""
        ids = np.flatnonzero(self.slot_of != NO_SLOT)
        paired = self.slot_of[ids]
        assert np.array_equal(self.id_of[paired], ids)
        assert np.count_nonzero(self.id_of != NO_ID) == len(ids)
        assert set(paired.tolist()) == set(np.flatnonzero(self._state == _DOUBLE).tolist())
        assert not (self._state == _TAKEN).any(), "a slot is lost"
        for state, members in (
            (_FREE, self._free[: self._num_free]),
            (_DOUBLE, self._doubles.order()),
            (_SOLE, self._soles.order()),
        ):
            expected = np.flatnonzero((self._state == state) & (self._num_lent == 0)).tolist()
            assert sorted(members.tolist()) == expected, "a slot is lost, or in two states"

    def _enter(self, slots: BlockIds, state: int) -> None:
        """These slots are in ``state`` from now on, and in its queue unless they are lent."""
        self._state[slots] = state
        slots = slots[self._num_lent[slots] == 0]
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
