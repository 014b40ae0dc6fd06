"""The files of one rank's disk tier: slots of equal size, and an index that says what may be trusted of them.

::

    rank-0.kv       | slot 0 | slot 1 | ...                 each a multiple of 4 KiB, allocated before it is used
    rank-0.index    | 8 KiB: JSON | 32 bytes per slot: serial (8) | xxh3-64 of the slot (8) | fingerprint (16) |

The JSON names the format, the store (random, the same in all files of a directory), the number and the size of the
slots, and the parts of the fingerprint (disk_start.py).  A slot is written in three steps: its index entry is cleared,
then its bytes are written, then the entry.  So a process that dies at any byte leaves an entry that is empty or right,
and what a machine loses that dies itself is found by the checksum.  Serial 0 is empty.

Directory 0700, files 0600.  ``lock_directory`` keeps a second engine out, and each rank locks its own files, because
ranks of an engine that was killed may live a moment longer than rank 0.
"""

import contextlib
import fcntl
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tp_engine.errors import ConfigError, MemoryBudgetError
from tp_engine.system.units import GIB, ceil_div, format_gib

_FORMAT = 1
_PAGE = 4096
_HEADER_BYTES = 2 * _PAGE
ENTRY = np.dtype([("serial", "<i8"), ("checksum", "<u8"), ("fingerprint", "<u8", 2)])
_LOCK_PATIENCE_S = 10.0
_MARGIN = 64 << 20  # bytes of the file system that stay free


class Stored(msgspec.Struct, kw_only=True):
    """The index's JSON; ``store`` and ``fingerprint`` are hexadecimal."""

    format: int
    store: str
    num_slots: int
    slot_bytes: int
    fingerprint: str
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Identity:
    """What blocks on disk must have in common with this engine: 16 bytes, and the parts that they are made of."""

    fingerprint: bytes
    parts: dict[str, str]


def lock_directory(path: Path) -> int:
    """Make the directory, readable by its owner alone, and lock it for this process's life; the descriptor.

    Raises ``ConfigError`` if that cannot be, or if another engine has it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"kv_disk_path is {str(path)!r}, which cannot be used ({error}); name a directory that this user owns"
        ) from error
    if not _locked(descriptor, 1.0):
        os.close(descriptor)
        raise ConfigError(
            f"kv_disk_path is {str(path)!r}, which another engine uses; stop it, or give each engine a directory of "
            "its own"
        )
    return descriptor


def choose_disk_slots(
    path: Path, size_gib: float, slot_bytes: int, *, rank: int, world_size: int, local_world_size: int
) -> int:
    """Return this rank's number of slots for ``kv_disk_size``, of which all ranks have equal parts.

    Raises ``MemoryBudgetError`` if not one slot fits into the size, or the size into the file system.
    """
    stride = _stride(slot_bytes)
    num_slots = int(size_gib * GIB) // world_size // (stride + ENTRY.itemsize)
    if num_slots < 1:
        least = math.ceil((stride + ENTRY.itemsize) * world_size / GIB * 1e6) / 1e6
        raise MemoryBudgetError(
            f"kv_disk_size is {size_gib:g} GiB, which {world_size} ranks share, and one block of a rank takes "
            f"{stride} bytes; raise it to at least {least:g}"
        )
    free = os.statvfs(path)
    room = free.f_bavail * free.f_frsize // local_world_size + _num_allocated(path / f"rank-{rank}.kv")
    if num_slots * stride + _MARGIN > room:
        raise MemoryBudgetError(
            f"kv_disk_size is {size_gib:g} GiB, of which rank {rank} takes {format_gib(num_slots * stride)}; its part "
            f"of what is free below {str(path)!r} is {format_gib(room)}, of which {format_gib(_MARGIN)} stay free; "
            f"lower it to at most {math.floor(max(0, room - _MARGIN) * world_size / GIB * 100) / 100:g}, or name "
            "another kv_disk_path"
        )
    return num_slots


class SlotFiles:
    """A rank's open files.  ``serials`` (slots,) int64 are those of what may be trusted; 0 where a slot is empty.

    ``store`` is "" and ``difference`` says why if nothing may be trusted.
    """

    def __init__(self, path: Path, rank: int, num_slots: int, slot_bytes: int, identity: Identity) -> None:
        """Raises ``MemoryBudgetError`` if there is no room, ``ConfigError`` if another process holds the files."""
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._stride, self._identity = _stride(slot_bytes), identity
        with contextlib.ExitStack() as undo:
            self._slots = _open(path / f"rank-{rank}.kv")
            undo.callback(os.close, self._slots)
            self._index = _open(path / f"rank-{rank}.index")
            undo.callback(os.close, self._index)
            self._reserve(path, rank)
            self.store, self.difference = self._read_header()
            self._entries = np.zeros(num_slots, dtype=ENTRY)
            if self.store:
                data = os.pread(self._index, num_slots * ENTRY.itemsize, _HEADER_BYTES)
                self._entries = np.frombuffer(data, dtype=ENTRY).copy()
                is_ours = (self._entries["fingerprint"] == np.frombuffer(identity.fingerprint, "<u8")).all(axis=1)
                self._entries[~is_ours] = np.zeros((), dtype=ENTRY)
            undo.pop_all()

    @property
    def serials(self) -> npt.NDArray[np.int64]:
        return self._entries["serial"]

    def begin(self, store: str, *, keeps: bool) -> None:
        """Write the header for ``store``; without ``keeps`` all slots are empty from now on."""
        if not keeps:
            self._entries[:] = np.zeros((), dtype=ENTRY)
            _pwrite(self._index, self._entries.tobytes(), _HEADER_BYTES)
        header = Stored(
            format=_FORMAT,
            store=store,
            num_slots=self.num_slots,
            slot_bytes=self.slot_bytes,
            fingerprint=self._identity.fingerprint.hex(),
            parts=self._identity.parts,
        )
        data = msgspec.json.encode(header)
        assert len(data) <= _HEADER_BYTES, "the parts of a fingerprint are short"
        _pwrite(self._index, data.ljust(_HEADER_BYTES), 0)
        os.ftruncate(self._index, _HEADER_BYTES + self.num_slots * ENTRY.itemsize)

    def read(self, slot: int, target: memoryview) -> bool:
        """Read a slot into ``target``; False, and the slot is empty, if it is not what was written."""
        entry = self._entries[slot]
        if not entry["serial"]:
            return False
        done = os.preadv(self._slots, [target], slot * self._stride)
        if done == len(target) and xxhash.xxh3_64_intdigest(target) == int(entry["checksum"]):
            return True
        self._clear(slot)
        return False

    def write(self, slot: int, source: memoryview, serial: int) -> None:
        """Write a slot under ``serial``.  Raises ``OSError``; then the slot is empty."""
        self._clear(slot)
        _pwrite(self._slots, source, slot * self._stride)
        checksum = xxhash.xxh3_64_intdigest(source)
        entry = np.array((serial, checksum, np.frombuffer(self._identity.fingerprint, "<u8")), dtype=ENTRY)
        _pwrite(self._index, entry.tobytes(), _HEADER_BYTES + slot * ENTRY.itemsize)
        self._entries[slot] = entry

    def close(self) -> None:
        """Give up the files and their lock."""
        os.close(self._slots)
        os.close(self._index)

    def _reserve(self, path: Path, rank: int) -> None:
        """Lock the files, and give them their sizes."""
        if not _locked(self._index, _LOCK_PATIENCE_S):
            raise ConfigError(
                f"kv_disk_path is {str(path)!r}, and another process still uses its rank-{rank}.index; stop it, or "
                "give each engine a directory of its own"
            )
        try:
            os.posix_fallocate(self._slots, 0, self.num_slots * self._stride)
            os.posix_fallocate(self._index, 0, _HEADER_BYTES + self.num_slots * ENTRY.itemsize)
        except OSError as error:
            raise MemoryBudgetError(
                f"cannot reserve {format_gib(self.num_slots * self._stride)} below {str(path)!r} ({error.strerror}); "
                "lower kv_disk_size"
            ) from error
        os.ftruncate(self._slots, self.num_slots * self._stride)  # not less: what was more is given back

    def _clear(self, slot: int) -> None:
        self._entries[slot] = np.zeros((), dtype=ENTRY)
        _pwrite(self._index, bytes(ENTRY.itemsize), _HEADER_BYTES + slot * ENTRY.itemsize)

    def _read_header(self) -> tuple[str, str]:
        """The store, or why there is none for this engine."""
        data = os.pread(self._index, _HEADER_BYTES, 0).strip(b" \0")
        if not data:
            return "", ""
        try:
            header = msgspec.json.decode(data, type=Stored)
        except msgspec.DecodeError:
            return "", "its index cannot be read"
        if header.format != _FORMAT:
            return "", f"its format is {header.format}, not {_FORMAT}"
        if header.slot_bytes != self.slot_bytes:
            return "", f"its slots have {header.slot_bytes} bytes, not {self.slot_bytes}" + self._other(header)
        if header.fingerprint != self._identity.fingerprint.hex():
            return "", "it was made with other values" + self._other(header)
        return header.store, ""

    def _other(self, header: Stored) -> str:
        """Which parts of the fingerprint differ."""
        names = sorted({name for name, _ in self._identity.parts.items() ^ header.parts.items()})
        return f": {', '.join(names)}" if names else ""


def _stride(slot_bytes: int) -> int:
    return ceil_div(slot_bytes, _PAGE) * _PAGE


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _locked(descriptor: int, patience_s: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() <= deadline_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def _num_allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
