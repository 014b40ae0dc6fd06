"""Rank 0 as a service in a process of its own, so that nothing of the caller's process is touched (``LLM``,
``AsyncLLM``).

``spawn_service`` starts a process that calls ``main``, which reads its ``ServiceSpec`` from standard input::

    caller                              rank 0
      spawn_service   -- the spec -->     main: import torch, start the engine
                      <-- a line ---      ready, or the error of the start
      its one client  <-- socket -->      EngineService, until the client says stop or has gone
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.processes import ChildRanks, die_with_parent
from tp_engine.engine.service_socket import new_address, remove_address
from tp_engine.engine.told_errors import ToldError
from tp_engine.errors import RankError
from tp_engine.ipc.pulse import Pulse
from tp_engine.job.shown_progress import shown_progress
from tp_engine.system import env
from tp_engine.system.child_process import ignore_stop_signals
from tp_engine.system.importing import without_collections
from tp_engine.system.log import configure_logging, get_logger

logger = get_logger(__name__)

_STOP_TIMEOUT_S = 15.0
_LOOK_S = 0.2
_READY = b"null\n"


class ServiceSpec(msgspec.Struct, kw_only=True):
    """What the new process is told, as JSON."""

    config: EngineConfig
    address: str
    parent_pid: int
    told_fd: int
    pulse: str
    log_level: str
    shows_progress: bool


class Service(Protocol):
    """A running ``EngineService``, whose one client connects to ``address``."""

    address: str

    def check_pulse(self) -> None:
        """``RankError`` if rank 0 hangs."""

    def kill(self) -> None:
        """End rank 0 now; the other ranks end with it."""

    def close(self) -> None:
        """Wait for its end, after its client has told it to stop."""


class ServiceHandle(Service):
    """A running service; its one client connects to ``address``.  Rank 0 counts as hung if it gives no sign of life for
    ``hard_limit_s``."""

    def __init__(self, process: ChildRanks, address: str, pulse: Pulse, hard_limit_s: float) -> None:
        self.address, self._process, self._pulse, self._hard_limit_s = address, process, pulse, hard_limit_s

    def is_alive(self) -> bool:
        """Return whether rank 0's process runs."""
        return self._process.is_alive()

    def check_pulse(self) -> None:
        """``RankError`` if rank 0 hangs.  A rank 0 that waits for other ranks still beats, and ends by itself."""
        silence_s = self._pulse.silence_s()
        if silence_s > self._hard_limit_s:
            raise RankError(0, f"its process has shown no sign of life for {silence_s:.1f} s")

    def wait_ready(self, told: BinaryIO, timeout_s: float, is_over: Callable[[], bool]) -> None:
        """Wait for the line that ends the start; raises the error that it tells, ``RankError`` if rank 0 ends without a
        line, and ``TimeoutError`` after ``timeout_s`` or when nobody waits any more (``is_over``)."""
        deadline_s = time.monotonic() + timeout_s
        while not select.select([told], [], [], _LOOK_S)[0]:
            self.check_pulse()
            if is_over() or time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s for rank 0 to be ready")
        line = told.readline()
        if not line:
            self._process.wait(timeout_s=_STOP_TIMEOUT_S)
            self._process.check()
        error = msgspec.json.decode(line, type=ToldError | None)
        if error is not None:
            raise error.rebuilt()

    def kill(self) -> None:
        """End rank 0 now; the other ranks end with it."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the process to end, after its client has told it to stop; kill it after some seconds."""
        self._process.wait(timeout_s=_STOP_TIMEOUT_S)
        self._pulse.stop_sharing()
        remove_address(self.address)


def spawn_service(config: EngineConfig, is_over: Callable[[], bool] = lambda: False) -> ServiceHandle:
    """Start rank 0, which starts the other ranks; returns when rank 0 is ready for its client.  Raises what the start
    raised.  The start ends when ``is_over``."""
    address, pulse = new_address(), Pulse.create()
    ours, theirs = os.pipe()
    with open(ours, "rb") as told:
        try:
            spec = ServiceSpec(
                config=config,
                address=address,
                parent_pid=os.getpid(),
                told_fd=theirs,
                pulse=pulse.address,
                log_level=_log_level(),
                shows_progress=env.log_level("INFO").upper() in ("INFO", "DEBUG"),
            )
            process = ChildRanks(__name__, [msgspec.json.encode(spec)], first_rank=0, pass_fds=(theirs,))
        finally:
            os.close(theirs)
        service = ServiceHandle(process, address, pulse, config.watchdog_timeout_s)
        try:
            service.wait_ready(told, config.startup_timeout_s, is_over)
        except BaseException:
            service.kill()
            service.close()
            raise
    return service


def _log_level() -> str:
    """What the ranks log: what the program lets this library log, which is warnings unless it says otherwise."""
    return env.log_level(logging.getLevelName(get_logger("tp_engine").getEffectiveLevel()))


def main() -> int:
    """Start the engine and serve its client until a stop; the exit code is 0 if the client asked for that stop."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServiceSpec)
    die_with_parent(spec.parent_pid)
    env.leave_launch()
    env.log_at(spec.log_level)
    config = spec.config
    configure_logging("rank 0", config.log_format)
    is_ready = False
    try:
        with without_collections():
            from tp_engine.engine.service import EngineService  # torch, which the caller's process need not import
            from tp_engine.engine.start import start_engine

        with contextlib.ExitStack() as stack:
            with shown_progress() if spec.shows_progress else contextlib.nullcontext():
                engine = start_engine(config, ends_process=True, pulse=Pulse.open(spec.pulse))
            stack.callback(engine.close)
            service = EngineService(engine, spec.address)
            stack.callback(service.close)
            is_ready = _tell(spec.told_fd, _READY)
            if not is_ready:
                return 1  # nobody waits any more
            service.run()
    except Exception as error:
        if is_ready:
            logger.exception("the engine failed")
        else:
            _tell(spec.told_fd, msgspec.json.encode(ToldError.of(error)) + b"\n")
        return 1
    return 0


def _tell(descriptor: int, line: bytes) -> bool:
    """Whether the parent still listens."""
    try:
        with open(descriptor, "wb") as told:
            told.write(line)
    except BrokenPipeError:
        return False
    return True
