"""The pool of KV blocks: who is free, in which order they are taken, and how many rows hold each block.

States of a block::

                        take()                       release(), no hash
         free  ----------------------->  used  ---------------------------> free    (front of the queue)
    (ref 0, no hash)                (ref >= 1)
                                       ^   |
                               share() |   | release(), hashed
                                       |   v
                                      cached  ----------------------------> used, without hash
                                   (ref 0, hash)   take(): evicted             (tail of the queue was oldest first)

The queue is a doubly linked list in two arrays with a sentinel, so that a hit removes a block from its middle in O(1)::

    sentinel -> free ... free -> cached (least recently used) ... cached (most recently used) -> sentinel

Free blocks precede all cached ones, hence nothing is evicted while a free block exists.  A table is released from its
end, so a sequence's tail is evicted before its head, which more requests may share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class BlockPool:
    """Owner of the free queue and of the reference counts; block ids are 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self.num_cached = 0
        self._ref_count = [0] * num_blocks
        self._hashed = bytearray(num_blocks)
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that carry no hash."""
        return self.num_available - self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that at least one row holds."""
        return self.num_blocks - self.num_available

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Take ``count`` blocks from the front; returns them, and those among them whose cached content is lost."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        following, ref_count, hashed = self._next, self._ref_count, self._hashed
        taken: list[int] = []
        evicted: list[int] = []
        block = following[self.num_blocks]
        for _ in range(count):
            taken.append(block)
            ref_count[block] = 1
            if hashed[block]:
                hashed[block] = 0
                evicted.append(block)
            block = following[block]
        self._link(self.num_blocks, block)
        self.num_available -= count
        self.num_cached -= len(evicted)
        return taken, evicted

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each block; a cached one leaves the queue and is used again."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert self._hashed[block], f"block {block} is free: it holds nothing to share"
                self._link(self._prev[block], self._next[block])
                self.num_available -= 1
                self.num_cached -= 1
            self._ref_count[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One holder gives back its block table, last block first."""
        ref_count, hashed = self._ref_count, self._hashed
        for block in reversed(table):
            assert ref_count[block] > 0, f"block {block} is released but nobody holds it"
            ref_count[block] -= 1
            if ref_count[block] == 0:
                self.num_available += 1
                if hashed[block]:
                    self.num_cached += 1
                    self._insert(block, self._prev[self.num_blocks])
                else:
                    self._insert(block, self.num_blocks)

    def mark_hashed(self, blocks: Sequence[int]) -> None:
        """The content of these used blocks has entered the prefix cache."""
        for block in blocks:
            assert self._ref_count[block] > 0, f"block {block} is cached but nobody holds it"
            self._hashed[block] = 1

    def forget_hashes(self) -> None:
        """All cached blocks become free; the order of the queue stays."""
        self._hashed = bytearray(self.num_blocks)
        self.num_cached = 0

    def ref_count(self, block: int) -> int:
        """How many rows hold ``block``."""
        return self._ref_count[block]

    def is_hashed(self, block: int) -> bool:
        """Whether ``block`` is in the prefix cache, used or not."""
        return bool(self._hashed[block])

    def free_order(self) -> Iterator[int]:
        """Free and cached blocks in the order in which they will be taken."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check_integrity(self) -> None:
        """Assert that free + cached + used = all, and that the queue holds exactly the blocks nobody uses, in order."""
        order = list(self.free_order())
        assert len(order) == self.num_available, f"{len(order)} blocks in the queue, {self.num_available} counted"
        assert len(set(order)) == len(order), "a block is queued twice"
        assert all(self._prev[self._next[block]] == block for block in [*order, self.num_blocks])
        unused = [block for block in range(self.num_blocks) if self._ref_count[block] == 0]
        assert sorted(order) == unused, "the queue and the reference counts disagree"
        assert min(self._ref_count) >= 0
        flags = [self._hashed[block] for block in order]
        assert sum(flags) == self.num_cached and flags == sorted(flags), "a cached block precedes a free one"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks

    def _link(self, before: int, after: int) -> None:
        self._next[before] = after
        self._prev[after] = before

    def _insert(self, block: int, before: int) -> None:
        """Queue ``block`` right behind ``before``."""
        after = self._next[before]
        self._link(before, block)
        self._link(block, after)
