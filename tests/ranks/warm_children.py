"""Children of this process, forked from one that has the engine imported: ranks of an engine, and HTTP processes.

Importing takes one to two seconds of processor time per process, more than most cases.  Tests whose subject is not how
processes start use the fixture ``warm_children`` of ``tests/conftest.py``; ``tests.ranks.warm_ranks`` is for jobs.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import IO, Any
from unittest.mock import patch

from tests.ranks.warm_ranks import FORKS

_FREE = 500
PLANT = "TP_ENGINE_TEST_PLANT"
"""The variable that names what children plant in themselves (``tests.planted``)."""
_CALLERS = ("tp_engine.engine.processes", "tp_engine.server.frontend_process")


@contextmanager
def warm_start() -> Iterator[None]:
    """Fork the children that are started within."""
    with ExitStack() as stack:
        for module in _CALLERS:
            stack.enter_context(patch.object(import_module(module), "start_child", _start_child))
        yield


def _start_child(
    module: str,
    settings: bytes,
    *,
    own_session: bool = False,
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> _Child:
    """As ``tp_engine.system.child_process.start_child``; descriptors get a number that is free in the child."""
    out, err = (1, 2) if output is None else (output.fileno(),) * 2
    files = {1: _Descriptor(out), 2: _Descriptor(err)}
    for number in pass_fds:
        files[_FREE + number] = _Descriptor(number)
        settings = settings.replace(b'_fd":%d,' % number, b'_fd":%d,' % (_FREE + number))
    return _Child(module, settings, dict(os.environ), own_session, files)


class _Child:
    """What the engine uses of ``subprocess.Popen``."""

    def __init__(self, *arguments: Any) -> None:
        self._process = FORKS.Process(target=_run, args=arguments)
        self._process.start()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        with self._lock:  # one thread alone may read the exit code
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A file descriptor that goes to the child with its arguments."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (reduction.DupFd(self._number),)


def _same(descriptor: Any) -> Any:
    return descriptor


def _run(module: str, settings: bytes, environment: dict[str, str], own_session: bool, files: dict[int, Any]) -> None:
    """The child: descriptors, environment and input as the module's ``main`` expects them."""
    gc.freeze()
    if own_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in files.items():
        received = descriptor.detach()
        os.dup2(received, number)
        os.close(received)
    sys.stdin = io.TextIOWrapper(io.BytesIO(settings))
    _end_with_parent()
    if (name := environment.get(PLANT)) is not None:
        from tests.planted import plant

        plant(name)
    sys.argv[:] = ["-c"]
    sys.exit(import_module(module).main())


def _end_with_parent() -> None:
    """In place of ``die_with_parent``, which takes another process than its parent for a new owner of the number."""
    from tp_engine.engine import processes

    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    processes._watched_parents.add(parent.pid)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
