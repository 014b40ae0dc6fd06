"""Compile the C sources once per machine, and keep the result in the user's cache folder.

::

    <cache folder>/native-<key>.so      key: sources, flags, compiler, processor, OpenMP runtime
                                        the last 32 bytes: SHA-256 of all before them

Of several processes that want it at the same time, one compiles and the others wait.  Where that does not work, because
the file system has no locks or the first one is too slow, each compiles into a folder of its own.  Whole files are
renamed, so a file that lies there is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tp_engine import env

FOLDER = Path(__file__).parent
SOURCES = sorted(path.name for path in FOLDER.glob("*.c"))
COMPILE_FLAGS = (
    *("-std=gnu11", "-O2", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"),
    "-falign-loops=32",  # some Intel processors decode a loop that straddles such a line anew in every turn
)
COMPILE_TIMEOUT_S = 400.0  # 10 to 20 s on an idle machine; below startup_timeout_s, so that PyTorch can step in
_LOOK_AGAIN_S = 0.05
_DIGEST_BYTES = 32


class BuildError(RuntimeError):
    """The kernels can not be compiled on this machine; the message says why."""


def built_library(openmp: Path) -> Path:
    """The compiled library, which uses the OpenMP runtime at ``openmp``; compiled now unless the cache has it.

    Raises ``BuildError``.
    """
    compiler = _find_compiler()
    path = env.cache_dir() / f"native-{_key(compiler, openmp)}.so"
    if is_intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            if not is_intact(path):
                with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
                    _compile(compiler, openmp, Path(folder)).replace(path)
    except OSError as error:
        raise BuildError(f"can not write to {path.parent} ({error}); set TP_ENGINE_CACHE_DIR") from error
    return path


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into ``folder``, but not longer than a compiler may take."""
    deadline_s = time.monotonic() + COMPILE_TIMEOUT_S
    lock = os.open(folder, os.O_RDONLY)
    try:
        while not _is_locked(lock) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Whether this process need not wait: it has the lock now, or the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_intact(path: Path) -> bool:
    """Whether ``path`` is a whole file that ``built_library`` has written."""
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
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What the compiler's ``native`` depends on: the model and flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return " ".join(os.uname())
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in lines if line.startswith(kept))


def _compile(compiler: Path, openmp: Path, folder: Path) -> Path:
    """The library in ``folder``, with its digest.

    It is linked to the runtime that torch has loaded, because a second one would start threads of its own.
    """
    objects = [folder / Path(name).with_suffix(".o") for name in SOURCES]

    def compile_one(name: str, target: Path) -> None:
        _run([str(compiler), *COMPILE_FLAGS, "-c", str(FOLDER / name), "-o", str(target)])

    with ThreadPoolExecutor(min(len(SOURCES), os.cpu_count() or 1)) as threads:
        list(threads.map(compile_one, SOURCES, objects))
    library = folder / "native.so"
    _run([str(compiler), "-shared", "-o", str(library), *map(str, objects), str(openmp), "-lm"])
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{command[0]} had not ended after {COMPILE_TIMEOUT_S:.0f} s; start once while the machine is idle, "
            "and the result is kept"
        ) from error
    except OSError as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
