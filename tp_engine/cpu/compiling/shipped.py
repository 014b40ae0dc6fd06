"""The libraries that a wheel brings: ``built/`` beside the C sources, one file for each level.

A file's name holds the digest of its sources, so one that a changed checkout has kept is not taken.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from tp_engine.cpu.compiling.gcc import BuildError, is_intact, sources_digest
from tp_engine.cpu.compiling.levels import Level
from tp_engine.cpu.prototypes import FOLDER

BUILT = FOLDER / "built"


def file_name(level: Level) -> str:
    """Return the name in ``built/`` of the library for ``level``."""
    return f"{level.name}-{sources_digest()}.so"


def is_shipped(level: Level) -> bool:
    """Return whether a wheel has brought a library for ``level``."""
    return (BUILT / file_name(level)).exists()


def shipped_library(level: Level) -> Path | None:
    """Return the wheel's library for ``level``; None if there is none of these sources.  ``BuildError`` if it is
    damaged."""
    if not is_shipped(level):
        return None
    path = BUILT / file_name(level)
    if not is_intact(path):
        raise BuildError(f"{path} is damaged; install the package again")
    return path


def ship(levels: Iterable[Level], folder: Path, make: Callable[[Level], Path]) -> None:
    """Write the library of each of ``levels`` into ``folder``; ``make`` compiles one."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        (folder / file_name(level)).write_bytes(make(level).read_bytes())
