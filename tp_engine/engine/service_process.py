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

_STOP_TIMEOUT_S = 15.0


class ServiceSpec(msgspec.Struct, kw_only=True):
    """What the process is told, as JSON on its standard input."""

    config: dict[str, str | int | float | bool | None]
    address: str
    parent_pid: int


class ServiceHandle:
    """A running service; ``address`` is where its one client connects."""

    def __init__(self, process: ChildRanks, address: str) -> None:
        self.address = address
        self._process = process

    def is_alive(self) -> bool:
        """Whether rank 0's process runs."""
        return self._process.is_alive()

    def close(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Wait for the process, which its client has told to stop, and kill it if it does not end."""
        self._process.wait(timeout_s=timeout_s)
        remove_address(self.address)


def spawn_service(config: EngineConfig) -> ServiceHandle:
    """Start rank 0, and through it the other ranks; returns when it is ready for its client.

    Raises ``ConfigError`` before anything is started, ``RankError`` if rank 0 ends while it starts.
    """
    check_config(config)
    address = new_address()
    spec = ServiceSpec(config=dataclasses.asdict(config), address=address, parent_pid=os.getpid())
    process = ChildRanks("tp_engine.engine.service_main", [msgspec.json.encode(spec)], first_rank=0)
    try:
        socket_path = Path(address.removeprefix("ipc://"))
        process.wait_until(socket_path.exists, timeout_s=config.startup_timeout_s, what="be ready")
    except BaseException:
        process.kill()
        remove_address(address)
        raise
    return ServiceHandle(process, address)
