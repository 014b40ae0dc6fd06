"""The pool of KV blocks: who is free, in which order they are taken, and how many rows hold each block.

States of a block::

                        take()                       release(), no content to keep
         free  ----------------------->  used  ---------------------------> free    (front of the spare queue)
    (ref 0, nothing)                (ref >= 1)  --------------------------> tail    (end of the spare queue)
                                       ^   |        release(), marked as tail
                               share() |   | release(), hashed
                                       |   v
                                      cached  ----------------------------> used, without hash
                                   (ref 0, hash)   take(): evicted             (end of the kept queue; oldest first)

The queues are doubly linked lists in two arrays, each with a sentinel, so that a hit removes a block from the middle in
O(1)::

    spare:  sentinel -> free ... free -> tail (oldest) ... tail (newest) -> sentinel
    kept:   sentinel -> cached (least recently used) ... cached (most recently used) -> sentinel

Spare blocks are taken before kept ones: no full cached block is evicted while a free block or a tail exists, and no
tail while a free block exists.  A table is released from its end, so a sequence's later blocks are evicted before its
first ones, which more requests may share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

#: What a block holds that outlives its last holder.
_NOTHING, _FULL, _TAIL = 0, 1, 2


class BlockPool:
    """Owner of the queues and of the reference counts; block ids are 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self.num_cached = 0
        self._num_kept = 0
        self._ref_count = [0] * num_blocks
        self._content = bytearray(num_blocks)
        self._spare, self._kept = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 0, self._kept]
        self._prev = [num_blocks, *range(num_blocks), self._kept]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose content nobody will look for."""
        return self.num_available - self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that at least one row holds."""
        return self.num_blocks - self.num_available

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Take the first ``count`` blocks; returns them, and those among them whose cached content is lost."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        from_spare = min(count, self.num_available - self._num_kept)
        taken = self._pop(self._spare, from_spare)
        if from_spare < count:
            taken += self._pop(self._kept, count - from_spare)
            self._num_kept -= count - from_spare
        ref_count, content = self._ref_count, self._content
        for block in taken:
            ref_count[block] = 1
        evicted = [block for block in taken if content[block]]
        for block in evicted:
            content[block] = _NOTHING
        self.num_available -= count
        self.num_cached -= len(evicted)
        return taken, evicted

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each block; a cached one leaves the queue and is used again."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert self._content[block] == _FULL, f"block {block} is free: it holds nothing to share"
                self._link(self._prev[block], self._next[block])
                self.num_available -= 1
                self.num_cached -= 1
                self._num_kept -= 1
            self._ref_count[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One holder gives back its block table, last block first."""
        ref_count, content = self._ref_count, self._content
        for block in reversed(table):
            assert ref_count[block] > 0, f"block {block} is released but nobody holds it"
            ref_count[block] -= 1
            if ref_count[block] == 0:
                self.num_available += 1
                if content[block] == _NOTHING:
                    self._insert(block, self._spare)
                    continue
                self.num_cached += 1
                self._num_kept += content[block] == _FULL
                self._insert(block, self._prev[self._kept if content[block] == _FULL else self._spare])

    def mark_hashed(self, blocks: Sequence[int]) -> None:
        """The content of these full, used blocks has entered the prefix cache."""
        assert all(map(self._ref_count.__getitem__, blocks)), f"one of blocks {blocks} is cached but nobody holds it"
        content = self._content
        for block in blocks:
            content[block] = _FULL

    def mark_tail(self, block: int) -> None:
        """The prefix cache knows the first tokens of this partly filled block, which its only holder will release."""
        assert self._ref_count[block] == 1, f"block {block} has {self._ref_count[block]} holders: it can be no tail"
        self._content[block] = _TAIL

    def forget_content(self) -> None:
        """All cached blocks become free, behind those that are."""
        for block in self._pop(self._kept, self._num_kept):
            self._insert(block, self._prev[self._spare])
        self._content = bytearray(self.num_blocks)
        self.num_cached = self._num_kept = 0

    def ref_count(self, block: int) -> int:
        """How many rows hold ``block``."""
        return self._ref_count[block]

    def holds_content(self, block: int) -> bool:
        """Whether ``block`` is in the prefix cache, used or not."""
        return self._content[block] != _NOTHING

    def contents(self) -> npt.NDArray[np.bool_]:
        """``holds_content`` of every block."""
        known: npt.NDArray[np.bool_] = np.frombuffer(self._content, dtype=np.uint8) != _NOTHING
        return known

    def free_order(self) -> Iterator[int]:
        """Free and cached blocks in the order in which they will be taken."""
        for sentinel in (self._spare, self._kept):
            block = self._next[sentinel]
            while block != sentinel:
                yield block
                block = self._next[block]

    def check_integrity(self) -> None:
        """Assert that free + cached + used = all, and that the queues hold exactly the blocks nobody uses, in order."""
        order = list(self.free_order())
        assert len(order) == self.num_available, f"{len(order)} blocks in the queues, {self.num_available} counted"
        assert len(set(order)) == len(order), "a block is queued twice"
        assert all(self._prev[self._next[block]] == block for block in [*order, self._spare, self._kept])
        unused = [block for block in range(self.num_blocks) if self._ref_count[block] == 0]
        assert sorted(order) == unused, "the queues and the reference counts disagree"
        assert min(self._ref_count) >= 0
        contents = [self._content[block] for block in order]
        in_order = [content for content in (_NOTHING, _TAIL, _FULL) for _ in range(contents.count(content))]
        assert contents == in_order, "a cached block precedes a free one"
        assert contents.count(_FULL) == self._num_kept and self.num_cached == self._num_kept + contents.count(_TAIL)
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks

    def _pop(self, sentinel: int, count: int) -> list[int]:
        """The first ``count`` blocks of a queue, which leave it."""
        taken: list[int] = []
        following = self._next
        block = following[sentinel]
        for _ in range(count):
            taken.append(block)
            block = following[block]
        self._link(sentinel, block)
        return taken

    def _link(self, before: int, after: int) -> None:
        self._next[before] = after
        self._prev[after] = before

    def _insert(self, block: int, before: int) -> None:
        """Queue ``block`` right behind ``before``."""
        after = self._next[before]
        self._link(before, block)
        self._link(block, after)
