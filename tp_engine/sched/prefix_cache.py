"""The prefix cache: which block holds the K/V of a known prefix.

A full block is named by a chained hash, ``hash(parent's hash, token ids)``, whose first parent stands for the process's
random key and the request's ``cache_salt``.  A hash only *finds* a candidate: a hit is verified against the candidate's
token ids and the identity of its parent, so that a collision can never give a request another one's K/V::

    identity:   salt ------> serial 7 -------> serial 8          serials are never used again, so a
    block:             12 [t0 .. t15]     5 [t16 .. t31]         chain through an evicted block is dead
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

#: Who precedes a block: the serial of its parent's content, or the salt in front of a sequence's first block.
Identity: TypeAlias = int | str


def block_hash(parent_hash: int, token_bytes: bytes) -> int:
    """64-bit name of a full block whose parent is named ``parent_hash``."""
    return xxhash.xxh3_64_intdigest(token_bytes, parent_hash)


class PrefixCache:
    """Verified map from block hashes to blocks.  ``block_bytes`` is the size of one block's int32 token ids."""

    def __init__(self, num_blocks: int, block_bytes: int, key: bytes | None = None) -> None:
        self._block_bytes = block_bytes
        self._key = secrets.token_bytes(16) if key is None else key
        self._block_of: dict[int, int] = {}
        self._hash_of: list[int | None] = [None] * num_blocks
        self._tokens_of = [b""] * num_blocks
        self._parent_of: list[Identity] = [""] * num_blocks
        self._serial_of = [0] * num_blocks
        self._next_serial = 1

    def __len__(self) -> int:
        return len(self._block_of)

    def extend_hashes(self, hashes: list[int], salt: str, token_bytes: bytes) -> None:
        """Append to a sequence's block hashes those of the further full blocks in ``token_bytes`` (all its tokens)."""
        size = self._block_bytes
        parent = hashes[-1] if hashes else xxhash.xxh3_64_intdigest(self._key + salt.encode("utf-8", "surrogatepass"))
        for start in range(len(hashes) * size, len(token_bytes) - size + 1, size):
            parent = block_hash(parent, token_bytes[start : start + size])
            hashes.append(parent)

    def match(self, hashes: Sequence[int], salt: str, token_bytes: bytes, max_blocks: int) -> list[int]:
        """The longest run of cached blocks, at most ``max_blocks``, that holds this sequence's first tokens."""
        size = self._block_bytes
        parent: Identity = salt
        found: list[int] = []
        for index, name in enumerate(hashes[:max_blocks]):
            block = self._block_of.get(name)
            if block is None or not self._holds(block, parent, token_bytes[index * size : (index + 1) * size]):
                break
            parent = self._serial_of[block]
            found.append(block)
        return found

    def identity(self, block: int) -> Identity:
        """The identity of a cached block's content."""
        assert self._hash_of[block] is not None, f"block {block} is not cached"
        return self._serial_of[block]

    def cached_blocks(self) -> list[int]:
        """All blocks that a hash leads to, used or not."""
        return list(self._block_of.values())

    def insert(
        self, blocks: Sequence[int], names: Sequence[int], parent: Identity, token_bytes: bytes
    ) -> tuple[list[int], Identity | None]:
        """Publish a run of computed, full blocks that follows ``parent``; ``names`` and ``token_bytes`` are theirs.

        Returns the blocks that are cached now and were not before, and the identity of the run's last content.
        Content that is cached already keeps its first block.  A different content of the same hash stays out, and
        ends the run: the identity is None.
        """
        added: list[int] = []
        size, start = self._block_bytes, 0
        for block, name in zip(blocks, names, strict=True):
            tokens = token_bytes[start : start + size]
            start += size
            first = self._block_of.get(name)
            if first is None:
                self._record(block, name, parent, tokens)
                added.append(block)
                first = block
            elif not self._holds(first, parent, tokens):
                return added, None
            parent = self._serial_of[first]
        return added, parent

    def evict(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be overwritten: they lose their hashes."""
        for block in blocks:
            name = self._hash_of[block]
            assert name is not None
            del self._block_of[name]
            self._hash_of[block] = None
            self._tokens_of[block] = b""

    def clear(self) -> None:
        """Forget everything."""
        self.evict(self.cached_blocks())

    def check_integrity(self) -> None:
        """Assert that the map and the blocks' own records agree."""
        assert all(self._hash_of[block] == name for name, block in self._block_of.items())
        assert sum(name is not None for name in self._hash_of) == len(self._block_of)
        assert all(len(self._tokens_of[block]) == self._block_bytes for block in self._block_of.values())

    def _record(self, block: int, name: int, parent: Identity, tokens: bytes) -> None:
        assert self._hash_of[block] is None, f"block {block} is cached under another hash"
        self._block_of[name] = block
        self._hash_of[block] = name
        self._tokens_of[block] = tokens
        self._parent_of[block] = parent
        self._serial_of[block] = self._next_serial
        self._next_serial += 1

    def _holds(self, block: int, parent: Identity, tokens: bytes) -> bool:
        return self._parent_of[block] == parent and self._tokens_of[block] == tokens
