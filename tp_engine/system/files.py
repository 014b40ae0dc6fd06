"""The one place that opens files which a stranger may have written or named: checkpoints, adapters, templates, keys.

A name can lead to anything.  A FIFO without a writer blocks its reader for ever, a device has no end, to open some
devices is an act already, and JSON may have any size and depth.  So only regular files are opened, and their size is
known before they are read.  An ``OSError`` has a ``strerror`` for people; content is a ``ValueError``.
"""

import errno
import json
import os
import re
import stat
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from tp_engine.system.units import MIB

MAX_JSON_BYTES = 16 * MIB
MAX_INDEX_BYTES = 128 * MIB  # a line per tensor: DeepSeek-V3 has 9 MB
MAX_HEADER_BYTES = 100_000_000  # as in the library safetensors
MAX_TOKENIZER_BYTES = 256 * MIB  # the largest have 40 MB
_READ_BY_LIBRARIES = (
    "*config.json",
    "*token*",
    "vocab*",
    "merges*",
    "*chat_template*",
    "*.jinja",
    "*.model",
    "tekken*",
)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """``OSError`` unless ``path`` is, or links to, a regular file of at most ``max_bytes``.  Opens nothing."""
    _check(path, path.stat(), max_bytes)


def open_regular(path: Path, max_bytes: int | None = None) -> IO[bytes]:
    """Open a regular file of at most ``max_bytes`` for reading; ``OSError`` for anything else."""
    check_regular(path, max_bytes)
    # O_NONBLOCK has no effect on regular files; it is for a FIFO that has come to the place meanwhile.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb")
    try:
        _check(path, os.fstat(file.fileno()), max_bytes)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``; ``OSError`` for anything else."""
    with open_regular(path, max_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the UTF-8 text of a regular file of at most ``max_bytes``; ``OSError`` or ``ValueError``."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in a regular file of at most ``max_bytes``; ``OSError`` or ``ValueError``."""
    return parse_json(read_bytes(path, max_bytes))


def parse_json(text: bytes) -> Any:
    """Return a JSON value of any depth that Python can hold; ``ValueError`` for anything else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, by tensor, and its bytes: 8 with its length, little-endian, then JSON.
    ``OSError`` or ``ValueError``."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {length:,} bytes, more than {MAX_HEADER_BYTES:,}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {type(header).__name__}, not an object")
    return header, 8 + length


def check_folder(folder: Path) -> None:
    """``OSError`` if a file that a library may open in the folder of a model or tokenizer is none to be opened.  The
    library transformers opens such files by itself, one level deep."""
    for path in sorted((*folder.iterdir(), *folder.glob("*/*"))):
        if any(fnmatch(path.name, pattern) for pattern in _READ_BY_LIBRARIES) and path.exists() and not path.is_dir():
            check_regular(path, MAX_TOKENIZER_BYTES)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of the file system that holds ``path``, such as ``ext4`` or ``nfs4``; empty if unknown."""
    place, kind, longest = path.resolve(), "", -1
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:  # "36 35 98:0 /root /mount/point options - kind source options"; later mounts hide earlier ones
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split()[4])
        if len(point) >= longest and place.is_relative_to(point):
            kind, longest = right.split()[0], len(point)
    return kind


def _check(path: Path, found: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    if max_bytes is not None and found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {max_bytes:,}", str(path))


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
