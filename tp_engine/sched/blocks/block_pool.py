"""The pool of KV blocks: which are free, in which order they are allocated, and how many rows hold each.

States of a block::

                      allocate()                     release(), no content to keep
         free  ----------------------->  used  ---------------------------> free    (allocated next)
    (ref 0, nothing)                (ref >= 1)  --------------------------> tail    (after the older tails)
                                       ^   |        release(), marked as tail
                               share() |   | release(), kept
                                       |   v
                                      cached  ----------------------------> used, without content
                                   (ref 0, full)   allocate(): evicted         (oldest first)

Free blocks are allocated first, then tails, then cached ones: no full cached block is evicted while a free block or a
tail exists, and no tail while a free block exists.  Free blocks are a stack; a table given back is allocated again in
its own order.  Tails and cached blocks are queues; a cached block leaves from the middle of its queue when it is hit.
A table is released from its end, so a sequence's later blocks are evicted before its first ones, which more requests
may share.  The pool does not know which group of layers a block is of: all blocks are of equal size.

All methods work on arrays of block ids and cost a few array operations whatever their number.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from tp_engine.sched.blocks.lru_queue import NO_BLOCKS, BlockIds, LruQueue

#: What of a block outlives its last holder.
_NOTHING, _FULL, _TAIL = 0, 1, 2

_ONE = np.ones((), dtype=np.int64)  # numpy adds an array in less time than a Python number


class BlockPool:
    """Owner of the queues and of ``ref_counts``, how many rows hold each block; ids are 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_available = num_blocks
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1)  # the first ``num_free``, last on top
        self._tails: deque[int] = deque()
        self._kept = LruQueue(num_blocks)
        self.ref_counts = np.zeros(num_blocks, dtype=np.int64)
        self._content = np.zeros(num_blocks, dtype=np.uint8)

    @property
    def num_cached(self) -> int:
        """Blocks that no row holds and whose content may be looked for."""
        return self.num_available - self.num_free

    @property
    def num_used(self) -> int:
        """Blocks that at least one row holds."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> tuple[BlockIds, BlockIds]:
        """Take the next ``count`` blocks from their queues; returns them, and those among them whose cached content is
        lost."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        from_free = min(count, self.num_free)
        taken = lost = NO_BLOCKS
        if from_free:
            self.num_free -= from_free
            taken = self._free[self.num_free : self.num_free + from_free][::-1].copy()
        if from_free < count:
            lost = self._pop_cached(count - from_free)
            self._content[lost] = _NOTHING
            taken = np.concatenate((taken, lost)) if from_free else lost
        self.ref_counts[taken] = 1
        self.num_available -= count
        return taken, lost

    def share(self, blocks: BlockIds) -> None:
        """Count one more holder of each block; a cached one leaves the queue and is used again."""
        counts = self.ref_counts[blocks]
        idle = blocks[counts == 0]
        assert np.all(self._content[idle] == _FULL), f"one of blocks {idle} is free: it holds nothing to share"
        self.ref_counts[blocks] = counts + _ONE
        self._kept.remove(idle)
        self.num_available -= len(idle)

    def release(self, table: BlockIds) -> None:
        """Give back the block table of one holder, last block first."""
        counts = self.ref_counts[table]
        assert 0 not in counts.tolist(), f"one of blocks {table} is released but no row holds it"
        self.ref_counts[table] = counts - _ONE
        left = table[counts == _ONE][::-1]
        content = self._content[left]
        free = left[content == _NOTHING]
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)
        self._kept.append(left[content == _FULL])
        self._tails.extend(left[content == _TAIL].tolist())
        self.num_available += len(left)

    def release_repeated(self, blocks: BlockIds) -> None:
        """Release blocks for several holders at once: each block is listed once per holder."""
        while len(blocks) and self.ref_counts[blocks].max() > 1:
            _, places = np.unique(blocks, return_index=True)
            places.sort()
            self.release(blocks[places])
            blocks = np.delete(blocks, places)
        self.release(blocks)

    def mark_full(self, blocks: BlockIds) -> None:
        """Mark these full, used blocks as cached."""
        self._content[blocks] = _FULL

    def mark_tail(self, blocks: BlockIds) -> None:
        """Mark these partly filled blocks, which leave their only holder, as cached up to their first tokens."""
        counts = self.ref_counts[blocks]
        assert np.all(counts == 1), f"blocks {blocks} have {counts} holders: they can be no tail"
        self._content[blocks] = _TAIL

    def forget_content(self) -> None:
        """Free all cached blocks, after those that are."""
        last_first = self._pop_cached(self.num_cached)[::-1]
        free = np.concatenate((last_first, self._free[: self.num_free]))
        self.num_free = len(free)
        self._free[: self.num_free] = free
        self._content[:] = _NOTHING

    def next_taken(self, count: int) -> BlockIds:
        """Return the full blocks, oldest first, among the next ``count`` that will be allocated."""
        return self._kept.peek(count - self.num_free - len(self._tails))

    def contents(self) -> npt.NDArray[np.bool_]:
        """Return whether each block is in the prefix cache, used or not."""
        known: npt.NDArray[np.bool_] = self._content != _NOTHING
        return known

    def free_order(self) -> list[int]:
        """Free and cached blocks in the order in which they will be allocated."""
        return [*self._free[: self.num_free][::-1].tolist(), *self._tails, *self._kept.order().tolist()]

    def check_integrity(self) -> None:
        """Assert that free + cached + used = all, and that the queues hold exactly the unused blocks, in order."""
        order = self.free_order()
        assert len(order) == self.num_available, f"{len(order)} blocks in the queues, {self.num_available} counted"
        assert sorted(order) == np.flatnonzero(self.ref_counts == 0).tolist(), "queues and reference counts disagree"
        assert self.ref_counts.min() >= 0
        contents = self._content[order].tolist()
        expected = [_NOTHING] * self.num_free + [_TAIL] * len(self._tails) + [_FULL] * len(self._kept)
        assert contents == expected, "a block is in the wrong queue"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks

    def _pop_cached(self, count: int) -> BlockIds:
        """Tails first, then the full blocks that have been unused for longest."""
        if not self._tails:
            return self._kept.pop(count)
        tails = [self._tails.popleft() for _ in range(min(count, len(self._tails)))]
        return np.concatenate((np.array(tails, dtype=np.intp), self._kept.pop(count - len(tails))))
