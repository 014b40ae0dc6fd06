"""Subscribers of KV events, written only from the wire format as routers are, each with its own checks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

U64 = 1 << 64


def new_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket in the context that an engine in this process uses too; what it has not sent is lost when it closes."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    return socket


def root_hash(salt: str = "", adapter: str = "") -> int:
    """What stands before a prompt, by the definition in docs/kv_events.md."""
    if not (salt or adapter):
        return 0
    return int.from_bytes(hashlib.sha256(json.dumps([salt, adapter]).encode()).digest()[:8], "little") or 1


def next_hash(before: int, token_ids: list[int]) -> int:
    """The hash of the block after another, by the same definition."""
    data = b"".join(one.to_bytes(4, "little") for one in token_ids)
    return int.from_bytes(hashlib.sha256(before.to_bytes(8, "little") + data).digest()[:8], "little") or 1


def plain_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The hashes of a prompt's full blocks."""
    found = [root_hash()]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        found.append(next_hash(found[-1], token_ids[start : start + block_size]))
    return found[1:]


class Block(NamedTuple):
    """What names a block: all token ids up to its end, and what they were computed with."""

    token_ids: tuple[int, ...]
    salt: str = ""
    adapter: str = ""


@dataclass
class Subscriber:
    """Rebuilds the cache's content; each event must fit what it knows.  ``media`` has the hashes on each medium."""

    block_size: int
    blocks: dict[int, Block] = field(default_factory=dict)
    media: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set(), "STORAGE": set()})
    num_stored: int = 0
    num_removed: int = 0

    def take(self, payload: bytes) -> None:
        """Apply a message."""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0 and events
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        """Apply an event in map form."""
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                assert event.keys() == {"type", "block_hashes", "medium"}
                for one in event["block_hashes"]:
                    self.media[event["medium"]].remove(one)
                    if not any(one in found for found in self.media.values()):
                        del self.blocks[one]
                    self.num_removed += 1
            case other:
                assert other == "AllBlocksCleared" and len(event) == 1
                self.blocks.clear()
                for found in self.media.values():
                    found.clear()

    def content(self) -> set[tuple[str, Block]]:
        """Each block with the medium that it is on."""
        return {(medium, self.blocks[one]) for medium, found in self.media.items() for one in found}

    def _store(self, event: dict[str, Any]) -> None:
        must = {
            "type",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
        }
        assert must <= event.keys() <= must | {"extra_keys"}
        hashes, token_ids, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert size == self.block_size and len(token_ids) == len(hashes) * size > 0
        parent, adapter = event["parent_block_hash"], event["lora_name"] or ""
        assert bool(adapter) == bool(event["lora_id"])
        salt, before = "", Block(())
        if keys := event.get("extra_keys"):
            assert parent is None and len(keys) == len(hashes) and keys[1:] == [None] * (len(keys) - 1)
            ((salt,), *_) = keys
        if parent is not None:
            before = self.blocks[parent]
            salt = before.salt
            assert before.adapter == adapter
        last = root_hash(salt, adapter) if parent is None else parent
        for number, one in enumerate(hashes):
            tokens = token_ids[number * size : (number + 1) * size]
            before = Block((*before.token_ids, *tokens), salt, adapter)
            last = next_hash(last, tokens)
            assert 0 < one < U64 and one == last
            assert one not in self.media[event["medium"]], "stored twice"
            assert self.blocks.setdefault(one, before) == before
            self.media[event["medium"]].add(one)
            self.num_stored += 1


def decode_as_dynamo(payload: bytes) -> list[tuple[Any, ...]]:
    """What Dynamo's router takes from a message: maps or lists, hashes as signed or unsigned numbers, unknown keys
    and further values ignored; a store with its medium, a removal, a clear."""
    time_s, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(time_s, float) and (rank is None or -(1 << 31) <= rank < 1 << 31)
    stored = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    found: list[tuple[Any, ...]] = []
    for event in events:
        names = {"BlockStored": stored, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}
        if isinstance(event, dict):
            tag, values = event["type"], event
        else:
            tag, values = event[0], dict(zip(names[event[0]], event[1:], strict=False))
        if values.get("group_idx") or values.get("kv_cache_spec_kind") not in (None, "full_attention"):
            continue
        hashes = [_unsigned(one) for one in values.get("block_hashes", ())]
        if tag == "BlockStored":
            parent, tokens = values.get("parent_block_hash"), values["token_ids"]
            assert all(type(one) is int and 0 <= one < 1 << 32 for one in tokens)
            assert len(tokens) == len(hashes) * values["block_size"]
            parent = None if parent is None else _unsigned(parent)
            found.append((tag, hashes, parent, tokens, values.get("medium"), values.get("lora_name")))
        else:
            found.append((tag, hashes, values.get("medium")))
    return found


def _unsigned(value: Any) -> int:
    assert type(value) is int and -(1 << 63) <= value < U64
    return value % U64


def decode_as_llm_d(payload: bytes) -> list[tuple[Any, ...]]:
    """What llm-d's index up to v0.8 takes: only lists, whose first value is the name; a parent of 0 means none."""
    batch = msgspec.msgpack.decode(payload)
    assert isinstance(batch, list) and len(batch) >= 2
    found: list[tuple[Any, ...]] = []
    for event in batch[1]:
        assert isinstance(event, list) and isinstance(event[0], str)
        tag, *values = event
        if tag == "BlockStored":
            assert 6 <= len(values) <= 8
            hashes, parent, tokens, block_size, lora_id, medium = values[:6]
            lora_name = values[6] if len(values) > 6 else None
            assert isinstance(medium, str) and (lora_id is None or isinstance(lora_id, int))
            assert all(np.uint64(one) for one in hashes)
            assert len(tokens) // block_size == len(hashes)
            found.append((tag, hashes, parent or None, tokens, medium, lora_name))
        elif tag == "BlockRemoved":
            assert len(values) == 2
            found.append((tag, values[0], values[1]))
        else:
            assert tag == "AllBlocksCleared"
            found.append((tag, [], None))
    return found
