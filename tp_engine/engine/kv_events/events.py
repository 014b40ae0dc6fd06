"""KV events as vLLM sends them, and the hashes by which they name blocks.

A message is the list of a time, its events and the number of a data-parallel rank, in msgpack.  A block's hash is of
its own token ids and of all before it::

    root   the number 0; with a salt or an adapter: the first 8 bytes of the SHA-256 of the JSON text [SALT, ADAPTER]
    hash   the first 8 bytes of the SHA-256 of the hash before it (8 bytes) and its token ids (int32 each)

All numbers are little-endian.  1 stands for a hash of 0, which some routers take for none.  Equal prompts have equal
hashes in all processes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

_HASH_BYTES = 8
_ZERO, _ONE = bytes(_HASH_BYTES), (1).to_bytes(_HASH_BYTES, "little")

#: Where blocks are, by their tier: the pool, the host tier, the disk tier.
MEDIA = ("GPU", "CPU", "STORAGE")


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that follow each other are on a medium now.  ``token_ids`` are of all of them.  ``extra_keys`` has the
    salt of the first block of a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks are not on a medium any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is on any medium."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def encode(time_s: float, events: Sequence[Event], *, as_arrays: bool) -> bytes:
    """Return the payload of a message; ``as_arrays``: an event is a list of its name and its fields' values."""
    found: Sequence[Any] = [_values(event) for event in events] if as_arrays else events
    return msgspec.msgpack.encode((time_s, found, 0))


def _values(event: Event) -> list[Any]:
    values = [event.__struct_config__.tag, *msgspec.structs.astuple(event)]
    if isinstance(event, BlockStored) and event.extra_keys is None:
        values.pop()
    return values


def root_hash(salt: str, adapter: str) -> int:
    """Return what stands before a prompt's first block."""
    if not (salt or adapter):
        return 0
    return int.from_bytes(_first_bytes(json.dumps([salt, adapter]).encode()), "little")


def chain_hashes(before: int, token_bytes: bytes, block_bytes: int) -> array[int]:
    """Return the hashes of the blocks with these token ids, behind the hash ``before``; uint64."""
    digest, digests = before.to_bytes(_HASH_BYTES, "little"), []
    for start in range(0, len(token_bytes), block_bytes):
        digest = _first_bytes(digest + token_bytes[start : start + block_bytes])
        digests.append(digest)
    return array("Q", np.frombuffer(b"".join(digests), "<u8").tobytes())


def _first_bytes(data: bytes) -> bytes:
    digest = hashlib.sha256(data).digest()[:_HASH_BYTES]
    return digest if digest != _ZERO else _ONE
