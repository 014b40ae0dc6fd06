"""What the disk tier keeps of the prefix cache: an append-only journal of which prefix lies in which slot.

::

    frame    length (4 bytes) | xxh3-64 of the content (8) | content (msgpack)
    journal  a frame of ``JournalHeader`` | frames of ``Record`` ...       a frame that is torn ends the journal

A *node* is a logical block, named by the identity that it had in the prefix cache of the process that wrote it
(``PrefixCache``).  A record has nodes that follow each other, after a parent or a salt.

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
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import NO_BLOCK, Identity, Place, PrefixCache

_VERSION = 2
_FRAME = struct.Struct("<IQ")
_SALT_BYTES = 16


class JournalHeader(msgspec.Struct, frozen=True, array_like=True):
    """``store`` (16 bytes) ties the journal to the files of the ranks; ``salt_key`` is secret.  ``block_bytes`` is the
    size of a block's token ids."""

    block_bytes: int
    num_groups: int
    store: bytes
    salt_key: bytes
    version: int = _VERSION

    def encode(self) -> bytes:
        """Return the first bytes of the journal."""
        return _frame(self)

    def digest(self, salt: str) -> str:
        """Return what stands for ``salt`` in the prefix cache and in the journal; no salt stays none."""
        if not salt:
            return salt
        return hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES, key=self.salt_key).hexdigest()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Nodes from ``first`` on, after the node or the salt ``parent``; ``token_bytes`` are their token ids.

    ``blocks`` are (place, slot, serial), (n, 3) int64.  A block is at ``place`` = node of the record * groups + group.
    Its content is in ``slot`` of every rank's file under ``serial``, a number that no other write has had.
    """

    first: int
    parent: Identity
    token_bytes: bytes
    blocks: bytes


@dataclass(slots=True)
class Node:
    """A logical block of the journal.  ``blocks`` has (slot, serial) of each group that is there; ``newest`` is the
    largest serial of the node and of those after it."""

    parent: Identity
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


def encode_blocks(cache: PrefixCache, ids: BlockIds, slots: BlockIds, serials: npt.NDArray[np.int64]) -> bytes:
    """Records of the blocks ``ids``, which are in runs of the cache, if they can still be found there."""
    if not len(ids):
        return b""
    runs, places = cache.where(ids)
    order = np.lexsort((places, runs))
    runs, blocks = runs[order], np.stack((places, slots, serials), axis=1)[order]
    numbers = blocks[:, 0] // cache.num_groups
    breaks = np.flatnonzero((np.diff(runs) != 0) | (np.diff(numbers) > 1)) + 1
    found: list[bytes] = []
    for serial, part in zip(runs[[0, *breaks]].tolist(), np.split(blocks, breaks), strict=True):
        run = cache.run(serial)
        if run is None or not len(part := part[part[:, 0] < run.length * cache.num_groups]):
            continue
        first, last = (part[[0, -1], 0] // cache.num_groups).tolist()
        before, size = run.name[0], len(run.name[1])
        record = Record(
            first=run.serial + first,
            parent=run.serial + first - 1 if first else str(before) if isinstance(before, str) else before,
            token_bytes=run.token_bytes[first * size : (last + 1) * size],
            blocks=(part - (first * cache.num_groups, 0, 0)).astype("<i8").tobytes(),
        )
        found.append(_frame(record))
    return b"".join(found)


def read_header(data: bytes) -> JournalHeader | None:
    """Return the header, if ``data`` begins with one of this version."""
    try:
        header = msgspec.msgpack.decode(next(_contents(data), b""), type=JournalHeader)
    except msgspec.DecodeError:
        return None
    return header if header.version == _VERSION else None


def read_nodes(data: bytes, header: JournalHeader, serials: Sequence[npt.NDArray[np.int64]]) -> dict[int, Node]:
    """Return the nodes of all whole records, with those blocks that every rank has: ``serials`` are each rank's, by
    slot."""
    nodes: dict[int, Node] = {}
    newest: dict[int, tuple[Node, int, int]] = {}  # of each slot, in the order of the records: node, group, serial
    size = header.block_bytes
    for content in islice(_contents(data), 1, None):
        record = msgspec.msgpack.decode(content, type=Record)
        parent = record.parent
        for number in range(len(record.token_bytes) // size):
            name = record.first + number
            nodes.setdefault(name, Node(parent, record.token_bytes[number * size : (number + 1) * size]))
            parent = name
        for place, slot, serial in np.frombuffer(record.blocks, "<i8").reshape(-1, 3).tolist():
            number, group = divmod(place, header.num_groups)
            newest.pop(slot, None)
            newest[slot] = nodes[record.first + number], group, serial
    for slot, (node, group, serial) in newest.items():
        if all(slot < len(one) and int(one[slot]) == serial for one in serials):
            node.blocks[group] = slot, serial
    return nodes


def _frame(content: JournalHeader | Record) -> bytes:
    encoded = msgspec.msgpack.encode(content)
    return _FRAME.pack(len(encoded), xxhash.xxh3_64_intdigest(encoded)) + encoded


def _contents(data: bytes) -> Iterator[bytes]:
    """The contents of all frames, until one is torn."""
    start = 0
    while start + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, start)
        content = data[start + _FRAME.size : start + _FRAME.size + length]
        if len(content) < length or xxhash.xxh3_64_intdigest(content) != checksum:
            return
        yield content
        start += _FRAME.size + length


class Restored(NamedTuple):
    """Slots whose content is in the cache again, those that should be lost first in front, and their serials."""

    slots: BlockIds
    serials: npt.NDArray[np.int64]


def restore(nodes: dict[int, Node], cache: PrefixCache, first_id: int, is_full: Sequence[bool]) -> Restored:
    """Enter all blocks that a prompt may find into an empty cache, a slot having the id ``first_id`` + slot.  Blocks
    after a missing one of a full group are left out, and so are nodes without a block."""
    living = _link(nodes, [group for group, full in enumerate(is_full) if full])
    entered: list[tuple[int, int, int, int]] = []  # newest serial after it, minus depth, slot, serial
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
    columns = np.array(sorted(entered), dtype=np.int64).reshape(-1, 4)
    return Restored(columns[:, 2].astype(np.intp), columns[:, 3].copy())


def _link(nodes: dict[int, Node], needed: Sequence[int]) -> dict[int, Node]:
    """The nodes that have blocks, in all ``needed`` groups, with their children and the newest serial after each."""
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
