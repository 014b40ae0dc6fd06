"""The prefix cache: which block holds the K/V of a known prefix.

A full block is named by a chained hash, ``hash(parent's hash, token ids)``, whose first parent stands for the process's
random key and the request's ``cache_salt``.  A hash only *finds* a candidate: a hit is verified against the candidate's
token ids and the identity of its parent, so that a collision can never give a request another one's K/V::

    identity:   salt ------> serial 7 -------> serial 8          serials are never used again, so a
    block:             12 [t0 .. t15]     5 [t16 .. t31]         chain through an evicted block is dead
                                                |
    tail:                                       +----------> 9 [t32 .. t37]     partly filled: to be copied

The *tail* of a sequence that says that others will continue it, its last, partly filled block, is found by its parent's
identity and its token ids themselves.  It is never shared: who goes on from it copies it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

#: Who precedes a block: the serial of its parent's content, or the salt in front of a sequence's first block.
Identity: TypeAlias = int | str

_TOKEN_BYTES = 4  # token ids are int32


def block_hash(parent_hash: int, token_bytes: bytes) -> int:
    """64-bit name of a full block whose parent is named ``parent_hash``."""
    return xxhash.xxh3_64_intdigest(token_bytes, parent_hash)


class PrefixCache:
    """Verified map from block hashes to blocks.  ``block_bytes`` is the size of one block's int32 token ids."""

    def __init__(self, num_blocks: int, block_bytes: int, key: bytes | None = None) -> None:
        self._block_bytes = block_bytes
        self._key = secrets.token_bytes(16) if key is None else key
        self._block_of: dict[int, int] = {}
        self._tail_of: dict[tuple[Identity, bytes], int] = {}
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

    def match_tail(self, parent: Identity, token_bytes: bytes) -> tuple[int, int] | None:
        """The longest tail behind ``parent`` that ``token_bytes`` begin with: its block, and how many tokens it holds.

        At least one of the tokens is left to compute.
        """
        if not self._tail_of:
            return None
        longest = min(self._block_bytes, len(token_bytes)) - _TOKEN_BYTES
        for end in range(longest, 0, -_TOKEN_BYTES):
            block = self._tail_of.get((parent, token_bytes[:end]))
            if block is not None:
                return block, end // _TOKEN_BYTES
        return None

    def identity(self, block: int) -> Identity:
        """The identity of a cached, full block's content."""
        assert self._hash_of[block] is not None, f"block {block} is not cached"
        return self._serial_of[block]

    def cached_blocks(self) -> list[int]:
        """All blocks that a hash leads to, used or not, and all tails."""
        return [*self._block_of.values(), *self._tail_of.values()]

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

    def insert_tail(self, block: int, parent: Identity, token_bytes: bytes) -> bool:
        """Publish a partly filled block that follows ``parent``; False if one with the same content is known."""
        assert 0 < len(token_bytes) < self._block_bytes and self._hash_of[block] is None
        if (parent, token_bytes) in self._tail_of:
            return False
        self._tail_of[parent, token_bytes] = block
        self._tokens_of[block] = token_bytes
        self._parent_of[block] = parent
        return True

    def evict(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be overwritten: nothing leads to them any more."""
        for block in blocks:
            name = self._hash_of[block]
            if name is None:
                del self._tail_of[self._parent_of[block], self._tokens_of[block]]
            else:
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
        for (parent, tokens), block in self._tail_of.items():
            assert self._hash_of[block] is None, f"block {block} is cached, and a tail"
            assert (self._parent_of[block], self._tokens_of[block]) == (parent, tokens)

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
