"""What a codec of the lower tiers does, and the one that keeps blocks as they are."""

import hashlib
from abc import ABC, abstractmethod

import numpy as np
import torch

from tp_engine.cpu import native_library
from tp_engine.plan import IntArray


class Codec(ABC):
    """Blocks of a pool (blocks, block_bytes) as *blobs* of ``blob_bytes`` each, both uint8, and back.

    A slot of the host tier holds one blob, and a disk keeps it unchanged; plans know nothing of it.  On a CPU ``blobs``
    are the slots themselves.  On CUDA they are a staging area on the device; there ``is_copy`` says that none is needed
    because a blob is the block.  ``work_bytes`` of the pool's device are used beside all that.

    Moves are ``pairs`` (n, 2) int32 on the host; if ``num_groups`` is above 1, they have a third column, the block's
    group of layers.  A block whose group is unknown, -1, must be refused.
    """

    is_copy = False
    blob_bytes: int
    num_groups = 1
    work_bytes = 0

    @abstractmethod
    def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> torch.Tensor | None:
        """Write blobs of blocks; ``pairs`` are blocks and places in ``blobs``.

        Returns (n,) bool on the pool's device, the blocks that it refuses, whose blobs must not be used; None if it
        never refuses any.
        """

    @abstractmethod
    def decode(self, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray) -> None:
        """Write the blocks of blobs; ``pairs`` are places in ``blobs`` and blocks."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """16 bytes that differ between codecs that do not read each other's blobs."""


class BlockCopy(Codec):
    """The codec ``none``: a blob is the block."""

    is_copy = True

    def __init__(self, block_bytes: int, order: str) -> None:
        """``order`` names how K/V lie in a block."""
        self.blob_bytes = block_bytes
        self._order = order

    def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> None:
        self._copy(pool, blobs, pairs)

    def decode(self, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray) -> None:
        self._copy(blobs, pool, pairs)

    def fingerprint(self) -> bytes:
        return fingerprint_of("none", self.blob_bytes, self._order)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, pairs: IntArray) -> None:
        library = native_library() if source.device.type == target.device.type == "cpu" else None
        if library is None:
            from_ids, to_ids = torch.from_numpy(pairs).long().unbind(1)
            target[to_ids] = source[from_ids]
            return
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        assert pairs.min() >= 0 and pairs[:, 0].max() < len(source) and pairs[:, 1].max() < len(target), pairs
        library.copy_blocks(source, target, pairs.ctypes.data, len(pairs), source.shape[1])


def fingerprint_of(*parts: object) -> bytes:
    """16 bytes for a codec's name and all that its blobs depend on."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
