"""What the prefix cache consists of: blocks that entered it together, and places behind them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tp_engine.sched.lru_queue import BlockIds

#: Who precedes a block: the identity of the block before it, or the salt in front of a sequence's first block.
Identity: TypeAlias = int | str

BlockName: TypeAlias = tuple[Identity, bytes]
"""What a block follows, and its token ids: names the run that begins with it, or a tail."""

NO_BLOCK = -1
"""In place of a block of the pool that is not there."""

TOKEN_BYTES = 4
"""Token ids are int32."""


class Run:
    """Logical blocks that entered the cache together; the first ``length`` of them are still there.

    ``name`` is what it follows and the token ids of its first block; ``token_bytes`` are those of all its blocks.
    ``blocks`` (n, G) has the block of each group, or ``NO_BLOCK``.  In a cache without a full group, ``parent`` is the
    run that this one follows, ``num_held`` counts the blocks that are there and ``num_followers`` the runs behind it.
    """

    __slots__ = ("blocks", "length", "name", "num_followers", "num_held", "parent", "serial", "token_bytes")

    def __init__(self, name: BlockName, serial: int, blocks: BlockIds, token_bytes: bytes) -> None:
        self.name, self.serial, self.blocks, self.token_bytes = name, serial, blocks, token_bytes
        self.length = len(blocks)
        self.parent: Run | None = None
        self.num_held = self.num_followers = 0

    def shorten(self, length: int) -> None:
        """Only the first ``length`` blocks are left; what the others held is given back when it is half."""
        self.length = length
        if 2 * length <= len(self.blocks):
            self.blocks = self.blocks[:length].copy()
            self.token_bytes = self.token_bytes[: length * len(self.name[1])]

    def num_equal(self, first: int, token_bytes: bytes, start: int, end: int) -> int:
        """How many blocks from ``first`` on have the tokens in ``token_bytes[start:end]``."""
        size = len(self.name[1])
        count = min(self.length - first, (end - start) // size)
        if count <= 0:
            return 0
        offset, length = first * size, count * size
        if self.token_bytes[offset : offset + length] == token_bytes[start : start + length]:
            return count
        ours = np.frombuffer(self.token_bytes, np.uint8, length, offset)
        theirs = np.frombuffer(token_bytes, np.uint8, length, start)
        return int(np.argmax(ours != theirs)) // size


#: How far a sequence has come in the cache: behind a logical block of a run, or still at its salt.
Place: TypeAlias = tuple[Run, int] | str

#: Behind a block that is not in the cache.
LOST: Place = (Run((0, b""), 0, np.empty((0, 1), dtype=np.intp), b""), 0)


def is_lost(place: Place) -> bool:
    """Whether the block before ``place`` has left the cache, so that nothing can be added there."""
    return not isinstance(place, str) and place[1] >= place[0].length


def identity(place: Place) -> Identity:
    """Of the last block before ``place``, or the salt."""
    return place if isinstance(place, str) else place[0].serial + place[1]
