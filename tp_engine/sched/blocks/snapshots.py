"""Snapshots of recurrent states: what the prefix cache needs besides blocks, where layers keep a state instead of K/V.

A state exists only as it is after a row's last computed token.  A prompt may begin with cached tokens if their blocks
are there, and a snapshot of the state after them.  Snapshots are slots of their own after those of all rows, evicted
in the order of their last use; each is named by the identity of the block before it in the prefix cache::

    slots      | row 0 | row 1 | ... | snapshot | snapshot | ...
    prompt A   | b0 | b1 | b2 | b3 |..        a snapshot after b3: the last block that an equal prompt can share
    prompt B   | b0 | b1 | b4 | ..            no snapshot after b1, so B computes all, and takes one there
    prompt C   | b0 | b1 | b5 | ..            begins after b1

They are taken at the end of a prompt, rounded down to a block, and where two prompts part.  A chunk ends there, and the
plan with the row's next chunk copies its slot first.  Identities are never used again, so a snapshot after an evicted
block is never found again, and goes in its turn.
"""

from collections import OrderedDict

from tp_engine.sched.blocks.prefix_cache import identity
from tp_engine.sched.running_batch import RunningBatch
from tp_engine.sched.sequence import Sequence, SequencePhase


class Snapshots:
    """``count`` slots from ``first_slot`` on, and the prompts that will fill some soon."""

    def __init__(self, first_slot: int, count: int, rows: RunningBatch) -> None:
        self._rows = rows
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # the one used longest ago first
        self._count = count
        self._expected: dict[int, tuple[Sequence, int]] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def longest(self, known: list[tuple[int, int]], block_size: int) -> tuple[int, tuple[int, int] | None]:
        """Return how many of a prompt's ``known`` blocks (``PrefixCache.stretches``) end with a snapshot, at most.  If
        these are not all, also the last known block, and the tokens up to it."""
        num_known = num_left = sum(count for _, count in known)
        for first, count in reversed(known):
            last = max((name for name in self._slot_of if first <= name < first + count), default=None)
            if last is not None:
                num_left += last + 1 - first - count
                break
            num_left -= count
        if num_left == num_known:
            return num_known, None
        return num_left, (known[-1][0] + known[-1][1] - 1, num_known * block_size)

    def use(self, name: int) -> int:
        """Return the slot of a snapshot that is there; it is the last to be evicted now."""
        self._slot_of.move_to_end(name)
        return self._slot_of[name]

    def take(self, name: int) -> int | None:
        """Return a slot for a new snapshot; None if it is there already."""
        self._expected.pop(name, None)
        if name in self._slot_of or not self._count:
            return None
        if not self._free:
            self._free.append(self._slot_of.popitem(last=False)[1])
        self._slot_of[name] = slot = self._free.pop()
        return slot

    def expect(self, name: int, sequence: Sequence, position: int) -> None:
        """``sequence`` will take this snapshot when it has computed ``position`` tokens."""
        self._expected[name] = sequence, position

    def is_expected(self, name: int) -> bool:
        """Return whether a running prompt will take this snapshot."""
        found = self._expected.get(name)
        if found is not None:
            sequence, position = found
            is_planned = sequence.phase is SequencePhase.PREFILL and position in sequence.snapshots_at
            if is_planned and self._rows.num_scheduled[sequence.row] <= position:
                return True
            del self._expected[name]
        return any(self._ends_at(sequence, name) for sequence in self._rows.prefilling())

    def _ends_at(self, sequence: Sequence, name: int) -> bool:
        """Whether the last chunk of a row ends with the block ``name``, where it takes a snapshot."""
        position = sequence.num_published * self._rows.block_size
        return position in sequence.snapshots_at and identity(sequence.place) == name

    def clear(self) -> None:
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._expected.clear()

    def check_integrity(self) -> None:
        """Assert that each slot is free or has one name."""
        slots = [*self._free, *self._slot_of.values()]
        assert len(slots) == len(set(slots)) == self._count
