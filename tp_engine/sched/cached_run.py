"""What the prefix cache consists of: blocks that entered it together, and places behind them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tp_engine.sched.lru_queue import BlockIds

#: Who precedes a block: the identity of the block before it, or the salt in front of a sequence's first block.
Identity: TypeAlias = int | str

BlockName: TypeAlias = tuple[Identity, bytes]
"""What a block follows, and its token ids: names the run that begins with it, or a tail."""

TOKEN_BYTES = 4
"""Token ids are int32."""


class Run:
    """Blocks that entered the cache together; the first ``length`` of them are still there.

    ``name`` is what it follows and the token ids of its first block; ``token_bytes`` are those of all its blocks.
    """

    __slots__ = ("blocks", "length", "name", "serial", "token_bytes")

    def __init__(self, name: BlockName, serial: int, blocks: BlockIds, token_bytes: bytes) -> None:
        self.name, self.serial, self.blocks, self.token_bytes = name, serial, blocks, token_bytes
        self.length = len(blocks)

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


#: How far a sequence has come in the cache: behind a block of a run, or still at its salt.
Place: TypeAlias = tuple[Run, int] | str


def identity(place: Place) -> Identity:
    """Of the last block before ``place``, or the salt."""
    return place if isinstance(place, str) else place[0].serial + place[1]
