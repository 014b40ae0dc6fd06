"""What was found on a device: a record for each product's shape, as JSON in the cache, in a pinned file, in a report.

::

    <cache folder>/tuned/<hash of device, operation, shape, sources>.json      one shape
    tuned.json (tp-engine tune --to, --tuned)                                  a device and all shapes of a model
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tp_engine.errors import ConfigError
from tp_engine.kernels.candidates import Choice, Choices, key_of, operation
from tp_engine.system import env
from tp_engine.system.files import MAX_JSON_BYTES, read_bytes
from tp_engine.system.log import get_logger
from tp_engine.system.version import __version__

logger = get_logger(__name__)

RIGHT, NOT_REACHED, LATE = "right", "not reached", "it gave no answer for"
MOST_STARTS = 5
"""How many starts try a shape whose candidates the time has not reached, or which were late."""
_PACKAGE = Path(__file__).parents[1]

Extent: TypeAlias = Literal["quick", "full"]
Facts: TypeAlias = dict[str, str]
"""What a device is, and with which versions it was tried."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate has shown: ``right``, or why it is not used, be that a fault or something that the device lacks.
    ``error`` is in units of the bound, times are by number of rows, ``ratios`` those to the code's own choice."""

    candidate: str
    verdict: str
    is_fault: bool = False
    error: float = 0.0
    microseconds: dict[int, float] = {}
    ratios: dict[int, float] = {}


class TunedShape(msgspec.Struct, frozen=True, kw_only=True):
    """A product's shape, which ``count`` weights of the model have, with its choice.

    Of a shape that ``is_open``, ``starts`` have tried some or all candidates; the time ended in this one in ``cuts``.
    ``clocks`` are those of the device before and after.
    """

    operation: str
    shape: dict[str, int | str]
    extent: Extent
    choice: Choice
    default: Choice
    tried: tuple[Tried, ...]
    count: int = 1
    starts: int = 1
    cuts: int = 0
    clocks: str = ""

    @property
    def is_open(self) -> bool:
        """Whether another start may find more: the time did not reach a candidate, or one was late."""
        return any(one.verdict == NOT_REACHED or one.verdict.startswith(LATE) for one in self.tried)

    @property
    def is_unknown(self) -> bool:
        """Whether the time has reached no candidate."""
        return all(one.verdict == NOT_REACHED for one in self.tried)

    @property
    def key(self) -> str:
        """The operation and the shape as one line."""
        return key_of(self.operation, self.shape)

    def is_usable(self, choice: Choice) -> bool:
        """Return whether all candidates of ``choice`` are right here, or the default that the time did not reach."""
        verdicts = {one.candidate: one.verdict for one in self.tried}
        own = {name for _, name in self.default}
        return all(
            verdicts.get(name) == RIGHT or (name in own and verdicts.get(name, NOT_REACHED) == NOT_REACHED)
            for _, name in choice
        )


class TunedTable(msgspec.Struct, frozen=True, kw_only=True):
    """All shapes of a model on a device."""

    device: Facts
    shapes: tuple[TunedShape, ...]
    product: str = __version__
    date: str = ""

    def choices(self) -> Choices:
        """Return what is not the code's own choice."""
        return Choices({one.key: one.choice for one in self.shapes if one.choice != one.default})


class _CacheFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the cache."""

    key: dict[str, str]
    found: TunedShape
    date: str
    product: str


class Store:
    """The cache of one device; ``places`` are those of its operations, None: the table's own."""

    def __init__(self, facts: Facts, places: Mapping[str, str] | None = None) -> None:
        self.facts, self._places = facts, places
        self.folder = env.cache_dir() / "tuned"
        self._has_said = False

    def lock_file(self) -> Path:
        """Return the file whose lock says who tunes this device."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / digest_of(self.facts)

    def read(self, name: str, shape: Mapping[str, int | str], extent: Extent) -> TunedShape | None:
        """Return what is known; None if nothing is, or not enough of it, or if the file is not whole."""
        key = self._key(name, shape)
        try:
            kept = msgspec.json.decode(self._path(key).read_bytes(), type=_CacheFile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.info("a file of tuned kernels is not read, and made anew: %s", error)
            return None
        is_known = all(operation(name, self._places).named(one) is not None for _, one in kept.found.choice)
        is_enough = kept.found.extent == "full" or extent == "quick"
        return kept.found if kept.key == key and is_known and is_enough else None

    def keep(self, found: TunedShape) -> None:
        """Write ``found``; where the folder cannot be written to, the log says so, once."""
        try:
            self._write(found)
        except OSError as error:
            if not self._has_said:
                self._has_said = True
                logger.warning(
                    "the choice of kernels is not kept, so each start tries them anew: %s; set TP_ENGINE_CACHE_DIR to "
                    "a folder that can be written to",
                    error,
                )

    def _write(self, found: TunedShape) -> None:
        key = self._key(found.operation, found.shape)
        kept = _CacheFile(key=key, found=found, date=today(), product=__version__)
        write_whole(self._path(key), msgspec.json.encode(kept))

    def _key(self, name: str, shape: Mapping[str, int | str]) -> dict[str, str]:
        sources = sources_digest(tuple(operation(name, self._places).sources))
        return {**self.facts, "operation": name, "shape": key_of("", shape).strip(), "sources": sources}

    def _path(self, key: Mapping[str, str]) -> Path:
        return self.folder / f"{digest_of(key)}.json"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is never seen in part."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def today() -> str:
    """Return the date for a file."""
    return time.strftime("%Y-%m-%d")


@cache
def sources_digest(globs: tuple[str, ...]) -> str:
    """Return the digest of the package's files that ``globs`` name: another kernel has other times and errors."""
    digest = hashlib.sha256()
    for pattern in globs:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def digest_of(key: Mapping[str, str]) -> str:
    """Return the name of ``key``'s file."""
    return hashlib.sha256("\0".join(f"{name}={value}" for name, value in sorted(key.items())).encode()).hexdigest()[:24]


def read_pinned(path: str) -> TunedTable:
    """Return the table of ``--tuned``; ``ConfigError`` if there is none in it."""
    remedy = "make it on this device with tp-engine tune MODEL --to FILE"
    try:
        return msgspec.json.decode(read_bytes(Path(path), MAX_JSON_BYTES), type=TunedTable)
    except OSError as error:
        raise ConfigError(f"tuned is {path!r}, which cannot be read ({error.strerror}); {remedy}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"tuned is {path!r}, which is no file of choices ({error}); {remedy}") from error


def write_pinned(path: str, table: TunedTable) -> None:
    """Write the file of ``--tuned``."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def shown(choice: Choice) -> str:
    """Return ``choice`` in words, such as ``panels to 4 rows, onednn above``."""
    if len(choice) == 1:
        return choice[0][1]
    lines = [f"{name} to {most} row{'s' if most > 1 else ''}" for most, name in choice[:-1]]
    return ", ".join((*lines, f"{choice[-1][1]} above"))


def encode_table(table: TunedTable | None) -> bytes:
    """Return a rank's table for the others; empty for none."""
    return b"" if table is None else msgspec.json.encode(table)


def decode_tables(parts: Sequence[bytes]) -> list[TunedTable]:
    """Return the tables that ranks have, in their order."""
    return [msgspec.json.decode(one, type=TunedTable) for one in parts if one]
