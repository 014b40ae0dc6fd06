"""Triton kernels are compiled once per host: of the ranks that need one, the first compiles it, and the others wait.

Triton keeps what it has compiled in a folder, ``TRITON_CACHE_DIR`` or ``~/.triton/cache``, but every process that does
not find a kernel there compiles it, and ranks launch the same kernels at the same time.
Inside ``compiling_once`` a process that finds none takes turns (``compile_turn.py``) with those that look for the same
kernel in the same folder, and looks again when it is its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from tp_engine.job.progress import tell_progress
from tp_engine.kernels.compile_turn import take_turn
from tp_engine.system.log import get_logger

logger = get_logger(__name__)


class _Kernels:
    """Counts what this process has found and compiled, for the log."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.turn = ExitStack()
        self._note = note
        self._compiled = self._found = 0
        self._seconds, self._began_s = 0.0, 0.0

    def begin(self, file: Path, name: str, find: Callable[[], Any]) -> Any:
        """What ``find`` returns for a kernel, at once or when another process has compiled it; None if this process
        must compile it."""
        self.turn.close()  # that of a kernel which could not be compiled
        if (kernel := find()) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.turn.enter_context(take_turn(file, lambda: find() is not None, what=f"the kernel {name}"))
            kernel, self._began_s = find(), time.monotonic()
        if kernel is not None:
            self._found += 1
            self.turn.close()
            self._note()
        return kernel

    def end(self) -> None:
        """Give up the turn, once a kernel is compiled and the others can find it."""
        self.turn.close()
        now_s = time.monotonic()
        self._compiled, self._seconds = self._compiled + 1, self._seconds + now_s - self._began_s
        self._note()
        tell_progress("compiling kernels", self._compiled + self._found, unit="are ready")

    def tell(self) -> None:
        if self._compiled:
            logger.info(
                "Triton: %d kernels compiled in %.1f s, %d found in %s",
                self._compiled, self._seconds, self._found, knobs.cache.dir,
            )  # fmt: skip


@contextmanager
def compiling_once(note: Callable[[], None]) -> Iterator[None]:
    """Within it, the ranks of this host share the compilation of kernels; errors of the compiler are raised.

    ``note`` is called for each kernel that is ready, equally often on each rank: a long compilation is progress.
    """
    kernels = _Kernels(note)
    before = knobs.cache.manager_class

    class SharedCache(before or FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            super().__init__(key, override, dump)
            self._folder = Path(knobs.cache.dir) / key

        def get_group(self, filename: str) -> dict[str, str] | None:
            def find() -> dict[str, str] | None:
                group: dict[str, str] | None = super(SharedCache, self).get_group(filename)
                return group if group and filename in group else None

            kernel: dict[str, str] | None = kernels.begin(self._folder / filename, Path(filename).stem, find)
            return kernel

        def put_group(self, filename: str, group: dict[str, str]) -> Any:
            path = super().put_group(filename, group)
            kernels.end()
            return path

    knobs.cache.manager_class = SharedCache
    try:
        yield
    finally:
        knobs.cache.manager_class = before
        kernels.turn.close()
        kernels.tell()
