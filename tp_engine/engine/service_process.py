"""Rank 0 in a process of its own, for a program that wants its event loop undisturbed (``AsyncLLM``)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.processes import ChildRanks
from tp_engine.engine.rank_group import check_config
from tp_engine.engine.service_socket import new_address, remove_address
from tp_engine.errors import RankError
from tp_engine.ipc.pulse import Pulse

_STOP_TIMEOUT_S = 15.0


class ServiceSpec(msgspec.Struct, kw_only=True):
    """What the process is told, as JSON on its standard input."""

    config: dict[str, str | int | float | bool | None]
    address: str
    parent_pid: int
    pulse: str


class ServiceHandle:
    """A running service; ``address`` is where its one client connects.

    Rank 0 counts as hung when it has given no sign of life for ``hard_limit_s``.
    """

    def __init__(self, process: ChildRanks, address: str, pulse: Pulse, hard_limit_s: float) -> None:
        self.address = address
        self._process = process
        self._pulse = pulse
        self._hard_limit_s = hard_limit_s

    def is_alive(self) -> bool:
        """Whether rank 0's process runs."""
        return self._process.is_alive()

    def check_pulse(self) -> None:
        """``RankError`` if rank 0 hangs; one that only waits for its ranks still beats, and ends by itself."""
        silence_s = self._pulse.silence_s()
        if silence_s > self._hard_limit_s:
            raise RankError(0, f"its process has shown no sign of life for {silence_s:.1f} s")

    def kill(self) -> None:
        """End rank 0 now; the other ranks end with it."""
        self._process.kill()

    def close(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Wait for the process, which its client has told to stop, and kill it if it does not end."""
        self._process.wait(timeout_s=timeout_s)
        self._pulse.stop_sharing()
        remove_address(self.address)


def spawn_service(config: EngineConfig) -> ServiceHandle:
    """Start rank 0, and through it the other ranks; returns when it is ready for its client.

    Raises ``ConfigError`` before anything is started, ``RankError`` if rank 0 ends while it starts.
    """
    check_config(config)
    address, pulse = new_address(), Pulse.create()
    spec = ServiceSpec(config=dataclasses.asdict(config), address=address, parent_pid=os.getpid(), pulse=pulse.address)
    process = ChildRanks("tp_engine.engine.service_main", [msgspec.json.encode(spec)], first_rank=0)
    service = ServiceHandle(process, address, pulse, config.hang_hard_limit_s)
    socket_path = Path(address.removeprefix("ipc://"))

    def is_ready() -> bool:
        service.check_pulse()
        return socket_path.exists()

    try:
        process.wait_until(is_ready, timeout_s=config.startup_timeout_s, what="be ready")
    except BaseException:
        service.kill()
        service.close()
        raise
    return service
