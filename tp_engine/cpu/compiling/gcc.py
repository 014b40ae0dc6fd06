"""Compile the C sources for one level, by gcc.

The library names no OpenMP runtime: its symbols are found in the one that torch has loaded, whatever that is called, so
there is never a second one with threads of its own.  clang's calls (``__kmpc_*``) are not in GNU's runtime.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from tp_engine.cpu.compiling.levels import Level
from tp_engine.cpu.prototypes import FOLDER, PLAYERS, players

SOURCES = [*sorted(path.name for path in FOLDER.glob("*.c")), PLAYERS]
COMPILE_FLAGS = (
    *("-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    "-falign-loops=32",  # some Intel processors decode a loop that straddles such a line anew in every turn
)
DIGEST_BYTES = 32


class BuildError(RuntimeError):
    """The kernels cannot be had on this machine; the message says why."""


def find_compiler() -> Path:
    """Return gcc; ``BuildError`` if there is none."""
    clang = ""
    for name in ("gcc", "cc"):
        if found := shutil.which(name):
            if "__clang__" not in _run([found, "-dM", "-E", "-x", "c", os.devnull], 60.0):
                return Path(found).resolve()
            clang = f" ({found} is clang, whose OpenMP is not the one that torch uses)"
    raise BuildError(f"there is no C compiler{clang}; install gcc")


@cache
def sources_digest() -> str:
    """Return what tells these sources and flags from others, 16 hexadecimal digits."""
    digest = hashlib.sha256("\0".join(COMPILE_FLAGS).encode())
    for path in sorted(FOLDER.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(players().encode())
    return digest.hexdigest()[:16]


def compile_level(
    compiler: Path, level: Level, folder: Path, report: Callable[[int], None], *, timeout_s: float
) -> Path:
    """Return the library for ``level``, written into the empty ``folder``; its last bytes are the SHA-256 of all before
    them.

    ``report`` hears how many of the ``SOURCES`` are done, in this thread.  Raises ``BuildError``.
    """
    deadline_s = time.monotonic() + timeout_s
    objects = [folder / Path(name).with_suffix(".o") for name in SOURCES]
    (folder / PLAYERS).write_text(players(), encoding="utf-8")

    def compile_one(name: str, target: Path) -> None:
        source = (folder if name == PLAYERS else FOLDER) / name
        command = [str(compiler), *COMPILE_FLAGS, *level.flags, f"-I{FOLDER}", "-c", str(source), "-o", str(target)]
        _run(command, deadline_s - time.monotonic())

    with ThreadPoolExecutor(min(len(SOURCES), len(os.sched_getaffinity(0)))) as threads:
        running = [threads.submit(compile_one, *pair) for pair in zip(SOURCES, objects, strict=True)]
        try:
            for number, done in enumerate(as_completed(running), 1):
                done.result()
                report(number)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    library = folder / f"{level.name}.so"
    # Without -fopenmp, which would name the compiler's own runtime.
    command = [str(compiler), "-shared", "-s", "-o", str(library), *map(str, objects), "-lm"]
    _run(command, deadline_s - time.monotonic())
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())
    return library


def is_intact(path: Path) -> bool:
    """Return whether ``path`` is a whole file that ``compile_level`` has written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _run(command: list[str], timeout_s: float) -> str:
    """What the command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.0, timeout_s), check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{command[0]} had not ended in time; start once while the machine is idle, and the result is kept"
        ) from error
    except OSError as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout
