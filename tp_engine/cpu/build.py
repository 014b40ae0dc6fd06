"""Compile the C sources once per machine, and keep the result in the user's cache folder.

::

    <cache folder>/code-<user id>/native-<key>.so      key: sources, flags, compiler, processor, OpenMP runtime
                                                       the last 32 bytes: SHA-256 of all before them

Whoever can write there runs code in this process, so that folder must belong to this user alone.

Of several processes that want it at the same time, one compiles and the others wait (``compile_turn.py``).  Each
compiles into a folder of its own.  Whole files are renamed, so a file that lies there is whole.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tp_engine.cpu.prototypes import FOLDER, PLAYERS, players
from tp_engine.job.progress import tell_progress
from tp_engine.kernels.compile_turn import Turn, take_turn
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

SOURCES = [*sorted(path.name for path in FOLDER.glob("*.c")), PLAYERS]
COMPILE_FLAGS = (
    *("-std=gnu11", "-O2", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    "-falign-loops=32",  # some Intel processors decode a loop that straddles such a line anew in every turn
)
# 10 to 20 s on an idle machine; with all waits, and below startup_timeout_s, so that PyTorch can step in.
COMPILE_TIMEOUT_S = 400.0
_SAY_S = 5.0
_DIGEST_BYTES = 32


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine; the message says why."""


def built_library(openmp: Path) -> Path:
    """Return the compiled library, which uses the OpenMP runtime at ``openmp``; compiled now unless the cache has it.

    Raises ``BuildError``.
    """
    compiler, deadline_s = _find_compiler(), time.monotonic() + COMPILE_TIMEOUT_S
    path = env.cache_dir() / f"code-{os.geteuid()}" / f"native-{_key(compiler, openmp)}.so"
    try:
        _claim(path.parent)
        if is_intact(path):
            return path
        with take_turn(path, lambda: path.exists() and is_intact(path), what="the CPU kernels") as turn:
            if is_intact(path):
                return path
            if turn is None:
                raise BuildError("two other processes seem to hang while they compile them (the log names them)")
            with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
                _compile(compiler, openmp, Path(folder), turn, deadline_s).replace(path)
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


def is_intact(path: Path) -> bool:
    """Return whether ``path`` is a whole file that ``built_library`` has written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _find_compiler() -> Path:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return Path(found).resolve()
    raise BuildError("there is no C compiler; install gcc")


def _key(compiler: Path, openmp: Path) -> str:
    status = compiler.stat()
    facts = [
        str(compiler),
        str(status.st_size),
        str(status.st_mtime_ns),
        str(openmp),
        *COMPILE_FLAGS,
        *SOURCES,
        _processor(),
    ]
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in sorted(FOLDER.glob("*.[ch]")):
        digest.update(path.read_bytes())
    digest.update(players().encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What the compiler's ``native`` depends on: the model and flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return " ".join(os.uname())
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in lines if line.startswith(kept))


def _compile(compiler: Path, openmp: Path, folder: Path, turn: Turn, deadline_s: float) -> Path:
    """The library in ``folder``, with its digest; says in the log how far it is, and ends by ``deadline_s``.

    It is linked to the runtime that torch has loaded, because a second one would start threads of its own.
    """
    objects = [folder / Path(name).with_suffix(".o") for name in SOURCES]
    begin_s = said_s = time.monotonic()
    logger.info("compiling the CPU kernels, once for this machine: %d files of C, by %s", len(SOURCES), compiler)

    (folder / PLAYERS).write_text(players(), encoding="utf-8")

    def compile_one(name: str, target: Path) -> None:
        source = (folder if name == PLAYERS else FOLDER) / name
        _run([str(compiler), *COMPILE_FLAGS, f"-I{FOLDER}", "-c", str(source), "-o", str(target)], deadline_s)

    with ThreadPoolExecutor(min(len(SOURCES), os.cpu_count() or 1)) as threads:
        running = [threads.submit(compile_one, *pair) for pair in zip(SOURCES, objects, strict=True)]
        for number, done in enumerate(as_completed(running), 1):
            done.result()
            progress = f"{number} of {len(SOURCES)} files"
            turn.report(progress)
            tell_progress(f"compiling the CPU kernels: {progress}")
            if time.monotonic() > said_s + _SAY_S:
                said_s = time.monotonic()
                logger.info("compiled %s of the CPU kernels", progress)
    library = folder / "native.so"
    _run([str(compiler), "-shared", "-o", str(library), *map(str, objects), str(openmp), "-lm"], deadline_s)
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - begin_s)
    return library


def _run(command: list[str], deadline_s: float) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(0.0, deadline_s - time.monotonic()), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{command[0]} had not ended after {COMPILE_TIMEOUT_S:.0f} s; start once while the machine is idle, "
            "and the result is kept"
        ) from error
    except OSError as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
