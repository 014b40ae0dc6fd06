"""Compile the C sources once per machine, and keep the result in the user's cache folder.

::

    <cache folder>/code-<user id>/<level>-<key>.so     key: sources, flags, compiler; "native": and processor

Whoever can write there runs code in this process, so that folder must belong to this user alone.

Of several processes that want it at the same time, one compiles and the others wait (``compile_turn.py``).  Each
compiles into a folder of its own.  Whole files are renamed, so a file that lies there is whole.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from tp_engine.cpu.compiling.gcc import SOURCES, BuildError, compile_level, find_compiler, is_intact, sources_digest
from tp_engine.cpu.compiling.levels import NATIVE, Level
from tp_engine.job.progress import tell_progress
from tp_engine.kernels.compile_turn import Turn, take_turn
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

# A level takes about 55 s of processor time.  With all waits, and below startup_timeout_s, so that PyTorch can step in.
COMPILE_TIMEOUT_S = 400.0
BUILD_TIMEOUT_S = 3600.0
"""Where no engine waits: a wheel or an environment is made."""
_LEFT_S = 86400.0  # what a process that was killed has left is this old
_WHAT = "the CPU kernels"


def compiled_library(level: Level, timeout_s: float = COMPILE_TIMEOUT_S) -> Path:
    """Return the library for ``level``; compiled now unless the cache has it.

    Raises ``BuildError``, also after ``timeout_s``.
    """
    compiler, deadline_s = find_compiler(), time.monotonic() + timeout_s
    path = env.cache_dir() / f"code-{os.geteuid()}" / f"{level.name}-{_key(compiler, level)}.so"
    try:
        _claim(path.parent)
        if is_intact(path):
            return path
        with take_turn(path, lambda: path.exists() and is_intact(path), what=_WHAT) as turn:
            if is_intact(path):
                return path
            if turn is None:
                raise BuildError("two other processes seem to hang while they compile them (the log names them)")
            _sweep(path.parent)
            with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
                _compile(compiler, level, Path(folder), turn, deadline_s).replace(path)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent} ({error}); set TP_ENGINE_CACHE_DIR") from error
    return path


def _claim(folder: Path) -> None:
    """Make the folder unless it is there; ``BuildError`` if others than this user can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        raise BuildError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; it must be a folder "
            f"of user {os.geteuid()} that nobody else can write to: remove it, or set TP_ENGINE_CACHE_DIR"
        )


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left of their compiling."""
    for left in folder.glob("build-*"):
        if time.time() > left.lstat().st_mtime + _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)


def _key(compiler: Path, level: Level) -> str:
    status = compiler.stat()
    facts = [str(compiler), str(status.st_size), str(status.st_mtime_ns), *level.flags, sources_digest()]
    if level is NATIVE:
        facts.append(_processor())
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What the compiler's ``native`` depends on: the model and flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return " ".join(os.uname())
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in lines if line.startswith(kept))


def _compile(compiler: Path, level: Level, folder: Path, turn: Turn, deadline_s: float) -> Path:
    """The library in ``folder``; tells how far it is, and ends by ``deadline_s``."""
    begin_s = time.monotonic()
    number = len(SOURCES)
    logger.info("compiling %s (%s), once for this machine: %d files of C, by %s", _WHAT, level.name, number, compiler)

    def report(done: int) -> None:
        turn.report(f"{done} of {number} files")
        tell_progress(f"compiling {_WHAT}", done, number, "files")

    library = compile_level(compiler, level, folder, report, timeout_s=deadline_s - begin_s)
    logger.info("compiled %s in %.1f s", _WHAT, time.monotonic() - begin_s)
    return library
