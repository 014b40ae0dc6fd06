"""Rank 0 as a service in a process of its own, so that a program's event loop is not disturbed (``AsyncLLM``).

``spawn_service`` starts a process that calls ``main``, which reads its ``ServiceSpec`` from standard input.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

import msgspec

from tp_engine import env
from tp_engine.child_process import ignore_stop_signals
from tp_engine.config import EngineConfig
from tp_engine.engine.processes import ChildRanks, die_with_parent
from tp_engine.engine.service import EngineService
from tp_engine.engine.service_socket import new_address, remove_address
from tp_engine.engine.start import check_config, start_engine
from tp_engine.errors import ConfigError, RankError
from tp_engine.ipc.pulse import Pulse
from tp_engine.log import configure_logging, get_logger

logger = get_logger(__name__)

_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.01


class ServiceSpec(msgspec.Struct, kw_only=True):
    """What the new process is told, as JSON."""

    config: dict[str, str | int | float | bool | tuple[str, ...] | None]
    address: str
    parent_pid: int
    pulse: str


class ServiceHandle:
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

    def kill(self) -> None:
        """End rank 0 now; the other ranks end with it."""
        self._process.kill()

    def close(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Wait for the process to end, after its client has told it to stop; kill it after ``timeout_s``."""
        self._process.wait(timeout_s=timeout_s)
        self._pulse.stop_sharing()
        remove_address(self.address)


def spawn_service(config: EngineConfig) -> ServiceHandle:
    """Start rank 0, which starts the other ranks; returns when rank 0 is ready for its client.  Raises ``ConfigError``
    before a process is started, under torchrun too, whose other ranks could not take part, and ``RankError`` if rank 0
    ends during its start."""
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        raise ConfigError(
            f"AsyncLLM starts its own ranks, but torchrun has started {launched.world_size}; start the script without "
            f"torchrun, with tensor_parallel_size={launched.world_size}, or use LLM"
        )
    check_config(config)
    address, pulse = new_address(), Pulse.create()
    spec = ServiceSpec(config=dataclasses.asdict(config), address=address, parent_pid=os.getpid(), pulse=pulse.address)
    process = ChildRanks("tp_engine.engine.service_process", [msgspec.json.encode(spec)], first_rank=0)
    service = ServiceHandle(process, address, pulse, config.watchdog_timeout_s)
    socket_path, deadline_s = Path(address.removeprefix("ipc://")), time.monotonic() + config.startup_timeout_s
    try:
        while not socket_path.exists():
            service.check_pulse()
            process.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {config.startup_timeout_s:g} s for rank 0 to be ready")
            time.sleep(_POLL_S)
    except BaseException:
        service.kill()
        service.close()
        raise
    return service


def main() -> int:
    """Start the engine and serve its client until a stop; the exit code is 0 if the client asked for that stop."""
    ignore_stop_signals()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ServiceSpec)
    die_with_parent(spec.parent_pid)
    config = EngineConfig(**spec.config)  # type: ignore[arg-type]  # checked by EngineConfig itself
    configure_logging("rank 0", config.log_format)
    try:
        engine = start_engine(config, ends_process=True, pulse=Pulse.open(spec.pulse))
        try:
            service = EngineService(engine, spec.address)
            try:
                service.run()
            finally:
                service.close()
        finally:
            engine.close()
    except Exception:
        logger.exception("the engine failed")
        return 1
    return 0
