"""What the disk tier keeps of the prefix cache: an append-only journal of which prefix lies in which slot.

::

    header   magic | version | block bytes | groups | store (16) | salt key (32) | checksum
    record   length | node, parent, logical blocks, blocks, bytes of the salt | salt | token ids |
                      blocks: place, slot, serial (int64 each) | checksum
    ...      a record that is torn ends the journal

A *node* is a logical block, named by the identity that it had in the prefix cache of the process that wrote it
(``PrefixCache``).  A record has nodes that follow each other, behind ``parent`` or, at -1, behind the salt.  Block i is
at ``place`` = node of the record * groups + group.  Its content is in ``slot`` of every rank's file under ``serial``,
a number that no other write has had.

A record is written when all ranks have written its blocks.  There is no record of an end: the newest record of a slot
counts, and only if the slot has its serial on every rank, which the next start finds out.  So a process may die at any
byte, and blocks are missing at worst.  The salt in a record is a keyed digest, whose key is in the header: who reads
the journal sees no tenant's salt, and equal salts stay equal over restarts.
"""

import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import NO_BLOCK, Place, PrefixCache, Run

_MAGIC = b"tpkvjrn1"
_VERSION = 1
_HEADER = struct.Struct("<8sIII16s32s")
_RECORD = struct.Struct("<qqiiH")
_LENGTH = struct.Struct("<I")
_SUM = struct.Struct("<Q")
_ROOT = -1
_SALT_BYTES = 16
_GROWTH = 4 << 20  # bytes that the journal may grow beyond twice its size before it is written anew


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """``store`` (16 bytes) ties the journal to the files of the ranks; ``salt_key`` is secret.  ``block_bytes`` is the
    size of a block's token ids."""

    block_bytes: int
    num_groups: int
    store: bytes
    salt_key: bytes

    def encode(self) -> bytes:
        """Return the first bytes of the journal."""
        packed = _HEADER.pack(_MAGIC, _VERSION, self.block_bytes, self.num_groups, self.store, self.salt_key)
        return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))

    def digest(self, salt: str) -> str:
        """Return what stands for ``salt`` in the prefix cache and in the journal; no salt stays none."""
        if not salt:
            return salt
        return hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES, key=self.salt_key).hexdigest()


@dataclass(slots=True)
class Node:
    """A logical block of the journal: ``parent`` is a node or, in front of the first block, a salt.  ``blocks`` has
    (slot, serial) of each group that is there."""

    parent: int | str
    token_bytes: bytes
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    children: list[int] = field(default_factory=list)
    newest: int = 0


class JournalSink(Protocol):
    """Where the journal goes; neither call waits for the disk."""

    def append(self, records: bytes) -> None:
        """Add records."""

    def rewrite(self, data: bytes) -> None:
        """Replace all of it."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What an earlier start left: the journal's header and nodes; ``first_serial`` is that of the next write."""

    header: JournalHeader
    nodes: dict[int, Node]
    first_serial: int
    sink: JournalSink
    clock: Callable[[], float] = time.monotonic


class Journal:
    """The journal as it grows."""

    def __init__(self, contents: DiskContents, cache: PrefixCache) -> None:
        self._header, self._sink, self._cache = contents.header, contents.sink, cache
        self._num_bytes = self._limit = 0

    @property
    def has_grown(self) -> bool:
        """Whether it is worth a pause to write it anew."""
        return self._num_bytes > self._limit

    @property
    def has_grown_far(self) -> bool:
        """Whether it has to be written anew, without a pause."""
        return self._num_bytes > 2 * self._limit

    def append(self, records: bytes) -> None:
        """Add records."""
        self._num_bytes += len(records)
        self._sink.append(records)

    def rewrite(self, ids: BlockIds, slots: BlockIds, serials: npt.NDArray[np.int64]) -> None:
        """Write it anew, with these blocks: ``encode_blocks``."""
        data = self._header.encode() + encode_blocks(self._cache, ids, slots, serials)
        self._sink.rewrite(data)
        self._num_bytes, self._limit = len(data), 2 * len(data) + _GROWTH


def encode_blocks(cache: PrefixCache, ids: BlockIds, slots: BlockIds, serials: npt.NDArray[np.int64]) -> bytes:
    """Records of the blocks ``ids``, which are in runs of the cache, if they can still be found there."""
    runs, places = cache.where(ids)
    order = np.lexsort((places, runs))
    runs, places, slots, serials = runs[order], places[order], slots[order], serials[order]
    found: list[bytes] = []
    breaks = (np.flatnonzero((np.diff(runs) != 0) | (np.diff(places // cache.num_groups) > 1)) + 1).tolist()
    for start, end in pairwise((0, *breaks, len(ids))):
        run = cache.run(int(runs[start])) if start < end else None
        if run is not None:
            blocks = np.stack((places[start:end], slots[start:end], serials[start:end]), axis=1)
            blocks = blocks[places[start:end] < run.length * cache.num_groups]
            if len(blocks):
                found.append(_encode(run, blocks.astype("<i8"), cache.num_groups))
    return b"".join(found)


def _encode(run: Run, blocks: npt.NDArray[np.int64], num_groups: int) -> bytes:
    first, last = int(blocks[0, 0]) // num_groups, int(blocks[-1, 0]) // num_groups
    blocks[:, 0] -= first * num_groups
    before = run.serial + first - 1 if first else run.name[0]
    parent, salt_bytes = (_ROOT, before.encode()) if isinstance(before, str) else (before, b"")
    size = len(run.name[1])
    head = _RECORD.pack(run.serial + first, parent, last - first + 1, len(blocks), len(salt_bytes))
    body = b"".join((head, salt_bytes, run.token_bytes[first * size : (last + 1) * size], blocks.tobytes()))
    body = _LENGTH.pack(len(body)) + body
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def read_header(data: bytes) -> JournalHeader | None:
    """Return the header, if ``data`` begins with one of this version."""
    end = _HEADER.size + _SUM.size
    if len(data) < end or _SUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEADER.size]):
        return None
    magic, version, block_bytes, num_groups, store, salt_key = _HEADER.unpack_from(data)
    return JournalHeader(block_bytes, num_groups, store, salt_key) if (magic, version) == (_MAGIC, _VERSION) else None


def read_nodes(data: bytes, header: JournalHeader, serials: Sequence[npt.NDArray[np.int64]]) -> dict[int, Node]:
    """Return the nodes of all whole records, with those blocks that every rank has: ``serials`` are each rank's, by
    slot."""
    nodes: dict[int, Node] = {}
    owner: dict[int, tuple[int, int]] = {}  # of each slot, by the newest record: node, group
    for first, parent, tokens, blocks in _records(data, header):
        size = header.block_bytes
        for number in range(len(tokens) // size):
            node = nodes.get(first + number)
            if node is None:
                nodes[first + number] = Node(parent, tokens[number * size : (number + 1) * size])
            parent = first + number
        for place, slot, serial in blocks:
            number, group = divmod(place, header.num_groups)
            if slot in owner:
                old_node, old_group = owner[slot]
                if nodes[old_node].blocks.get(old_group, (None,))[0] == slot:
                    del nodes[old_node].blocks[old_group]
            owner[slot] = first + number, group
            nodes[first + number].blocks[group] = slot, serial
    shortest = min((len(one) for one in serials), default=0)
    for node in nodes.values():
        node.blocks = {
            group: (slot, serial)
            for group, (slot, serial) in node.blocks.items()
            if slot < shortest and all(int(one[slot]) == serial for one in serials)
        }
    return nodes


def _records(data: bytes, header: JournalHeader) -> Iterator[tuple[int, int | str, bytes, list[list[int]]]]:
    """First node, parent, token ids and (place, slot, serial) of each record, until one is torn."""
    start = _HEADER.size + _SUM.size
    while start + _LENGTH.size <= len(data):
        end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
        if end + _SUM.size > len(data):
            return
        if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[start:end]):
            return
        node, parent, num_nodes, num_blocks, num_salt = _RECORD.unpack_from(data, start + _LENGTH.size)
        salt_at = start + _LENGTH.size + _RECORD.size
        tokens_at = salt_at + num_salt
        blocks_at = tokens_at + num_nodes * header.block_bytes
        blocks = np.frombuffer(data, "<i8", 3 * num_blocks, blocks_at).reshape(-1, 3).tolist()
        before = data[salt_at:tokens_at].decode() if parent == _ROOT else parent
        yield node, before, data[tokens_at:blocks_at], blocks
        start = end + _SUM.size


@dataclass(frozen=True, slots=True)
class Restored:
    """Slots whose content is in the cache again, those that should be lost first in front, and their serials."""

    slots: BlockIds
    serials: npt.NDArray[np.int64]


def restore(nodes: dict[int, Node], cache: PrefixCache, first_id: int, is_full: Sequence[bool]) -> Restored:
    """Enter all blocks that a prompt may find into an empty cache, a slot having the id ``first_id`` + slot.  Blocks
    behind a missing one of a full group are left out, and so are nodes without a block."""
    living = _link(nodes, [group for group, full in enumerate(is_full) if full])
    entered: list[tuple[int, int, int, int]] = []  # newest serial behind it, minus depth, slot, serial
    roots = [name for name, node in living.items() if isinstance(node.parent, str)]
    stack: list[tuple[int, Place, int]] = [(name, str(living[name].parent), 0) for name in reversed(roots)]
    while stack:
        name, place, depth = stack.pop()
        chain = [living[name]]
        while len(chain[-1].children) == 1:
            chain.append(living[chain[-1].children[0]])
        blocks = np.full((len(chain), len(is_full)), NO_BLOCK, dtype=np.intp)
        orders: dict[int, tuple[int, int, int, int]] = {}
        for number, node in enumerate(chain):
            for group, (slot, serial) in node.blocks.items():
                blocks[number, group] = first_id + slot
                orders[first_id + slot] = node.newest, -depth - number, slot, serial
        added, place = cache.insert(blocks, place, b"".join(node.token_bytes for node in chain))
        entered += [orders[one] for one in added.tolist()]  # not what another node of equal tokens has
        stack += [(child, place, depth + len(chain)) for child in chain[-1].children]
    entered.sort()
    slots = np.array([slot for _, _, slot, _ in entered], dtype=np.intp)
    return Restored(slots, np.array([serial for *_, serial in entered], dtype=np.int64))


def _link(nodes: dict[int, Node], needed: Sequence[int]) -> dict[int, Node]:
    """The nodes that have blocks, in all ``needed`` groups, with their children and the newest serial behind each."""
    living = {
        name: node for name, node in nodes.items() if node.blocks and all(group in node.blocks for group in needed)
    }
    for name in sorted(living, reverse=True):  # a node has a larger name than its parent
        node = living[name]
        node.newest = max(node.newest, *(serial for _, serial in node.blocks.values()))
        parent = None if isinstance(node.parent, str) else living.get(node.parent)
        if parent is not None:
            parent.children.append(name)
            parent.newest = max(parent.newest, node.newest)
    return living
