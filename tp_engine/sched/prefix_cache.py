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
_RUN_BLOCKS = 32  # bounds what is remembered of evicted blocks while others of their run are still cached


def block_hash(parent_hash: int, token_bytes: bytes) -> int:
    """64-bit name of a full block whose parent is named ``parent_hash``."""
    return xxhash.xxh3_64_intdigest(token_bytes, parent_hash)


class _Run:
    """Blocks that entered the cache together: block i has the hash ``names[i]``, the identity ``serial + i`` and the
    i-th part of ``token_bytes``, and follows block i - 1 or, the first one, ``parent``.
    """

    __slots__ = ("names", "parent", "serial", "token_bytes")

    def __init__(self, names: Sequence[int], parent: Identity, serial: int, token_bytes: bytes) -> None:
        self.names, self.parent, self.serial, self.token_bytes = names, parent, serial, token_bytes

    def parent_of(self, index: int) -> Identity:
        return self.serial + index - 1 if index else self.parent


class PrefixCache:
    """Verified map from block hashes to blocks.  ``block_bytes`` is the size of one block's int32 token ids."""

    def __init__(self, num_blocks: int, block_bytes: int, key: bytes | None = None) -> None:
        self._block_bytes = block_bytes
        self._key = secrets.token_bytes(16) if key is None else key
        self._block_of: dict[int, int] = {}
        self._tail_of: dict[tuple[Identity, bytes], int] = {}
        self._run_of: list[_Run | None] = [None] * num_blocks
        self._index_of = [0] * num_blocks  # in its run
        self._tails: list[tuple[Identity, bytes] | None] = [None] * num_blocks
        self._next_serial = 1

    def __len__(self) -> int:
        return len(self._block_of)

    def extend_hashes(self, hashes: list[int], salt: str, token_bytes: bytes) -> None:
        """Append to a sequence's block hashes those of the further full blocks in ``token_bytes`` (all its tokens)."""
        size, name = self._block_bytes, block_hash
        parent = hashes[-1] if hashes else xxhash.xxh3_64_intdigest(self._key + salt.encode("utf-8", "surrogatepass"))
        for start in range(len(hashes) * size, len(token_bytes) - size + 1, size):
            parent = name(parent, token_bytes[start : start + size])
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
            parent = self.identity(block)
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
        run = self._run_of[block]
        assert run is not None, f"block {block} is not cached"
        return run.serial + self._index_of[block]

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
        size = self._block_bytes
        for start in range(0, len(names), _RUN_BLOCKS):
            run = slice(start, start + _RUN_BLOCKS)
            insert = self._insert_new if self._all_new(names[run]) else self._insert_singly
            new, last = insert(blocks[run], names[run], token_bytes[start * size : run.stop * size], parent)
            added += new
            if last is None:
                return added, None
            parent = last
        return added, parent

    def _all_new(self, names: Sequence[int]) -> bool:
        return self._block_of.keys().isdisjoint(names) and len(set(names)) == len(names)

    def _insert_new(
        self, blocks: Sequence[int], names: Sequence[int], token_bytes: bytes, parent: Identity
    ) -> tuple[Sequence[int], Identity | None]:
        """``insert`` of blocks none of which is known, as one run."""
        run = _Run(names, parent, self._next_serial, token_bytes)
        self._next_serial += len(names)
        self._block_of.update(zip(names, blocks, strict=True))
        run_of, index_of = self._run_of, self._index_of
        for index, block in enumerate(blocks):
            assert run_of[block] is None, f"block {block} is cached under another hash"
            run_of[block] = run
            index_of[block] = index
        return blocks, self._next_serial - 1

    def _insert_singly(
        self, blocks: Sequence[int], names: Sequence[int], token_bytes: bytes, parent: Identity
    ) -> tuple[Sequence[int], Identity | None]:
        """``insert`` of blocks some of which may be known."""
        added: list[int] = []
        last, size = parent, self._block_bytes
        for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
            tokens = token_bytes[index * size : (index + 1) * size]
            first = self._block_of.get(name)
            if first is None:
                self._insert_new([block], [name], tokens, last)
                added.append(block)
            elif not self._holds(first, last, tokens):
                return added, None
            last = self.identity(block if first is None else first)
        return added, last

    def insert_tail(self, block: int, parent: Identity, token_bytes: bytes) -> bool:
        """Publish a partly filled block that follows ``parent``; False if one with the same content is known."""
        assert 0 < len(token_bytes) < self._block_bytes and self._run_of[block] is None
        if (parent, token_bytes) in self._tail_of:
            return False
        self._tail_of[parent, token_bytes] = block
        self._tails[block] = parent, token_bytes
        return True

    def evict(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be overwritten: nothing leads to them any more."""
        for block in blocks:
            run = self._run_of[block]
            if run is not None:
                del self._block_of[run.names[self._index_of[block]]]
                self._run_of[block] = None
                continue
            tail = self._tails[block]
            assert tail is not None, f"block {block} is not cached"
            del self._tail_of[tail]
            self._tails[block] = None

    def clear(self) -> None:
        """Forget everything."""
        self.evict(self.cached_blocks())

    def check_integrity(self) -> None:
        """Assert that the map and the blocks' own records agree."""
        runs = {block: run for block, run in enumerate(self._run_of) if run is not None}
        assert runs.keys() == set(self._block_of.values()) and len(runs) == len(self._block_of)
        for name, block in self._block_of.items():
            assert runs[block].names[self._index_of[block]] == name, f"block {block} is cached under another hash"
        tails = {block: tail for block, tail in enumerate(self._tails) if tail is not None}
        assert tails == {block: tail for tail, block in self._tail_of.items()}
        assert runs.keys().isdisjoint(tails), "a block is cached, and a tail"

    def _holds(self, block: int, parent: Identity, tokens: bytes) -> bool:
        run, index, size = self._run_of[block], self._index_of[block], self._block_bytes
        assert run is not None, f"block {block} is not cached"
        return run.parent_of(index) == parent and run.token_bytes[index * size : (index + 1) * size] == tokens
