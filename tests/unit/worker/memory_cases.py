"""A device and a group of ranks that exist only in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tp_engine.job.topology import RankInfo
from tp_engine.system.units import GIB
from tp_engine.worker.device import Device, MemorySnapshot


class FakeDevice(Device):
    """A GPU shared with another process; the test sets how many bytes each holds."""

    type = "cuda"

    def __init__(self, total: int = 80 * GIB) -> None:
        self.torch_device = torch.device("cpu")
        self.total = total
        self.allocated = 0
        self.peak = 0
        self.cached = 0
        self.non_torch = GIB // 2
        self.co_tenant = 0
        self.calls: list[str] = []

    def allocate(self, num_bytes: int) -> None:
        """A torch allocation (or, below zero, a release) of this process."""
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def snapshot(self) -> MemorySnapshot:
        reserved = self.allocated + self.cached
        return MemorySnapshot(
            total=self.total,
            free=self.total - reserved - self.non_torch - self.co_tenant,
            torch_allocated=self.allocated,
            torch_reserved=reserved,
            torch_peak=self.peak,
            non_torch=self.non_torch,
        )

    def reset_peak(self) -> None:
        self.peak = self.allocated
        self.calls.append("reset_peak")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.cached = 0

    def set_current(self) -> None:
        self.calls.append("set_current")

    def enter_thread(self) -> None:
        self.calls.append("enter_thread")


class _Meeting:
    """Where the simulated ranks exchange values and wait for each other."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=100)
        self.values: list[Any] = [None] * world_size


class SimulatedGroup:
    """One thread's view of a group of threads."""

    def __init__(self, info: RankInfo, meeting: _Meeting) -> None:
        self.info = info
        self._meeting = meeting

    def _exchange(self, value: Any) -> list[Any]:
        self._meeting.values[self.info.rank] = value
        self._meeting.barrier.wait()
        everything = list(self._meeting.values)
        self._meeting.barrier.wait()
        return everything

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._exchange(payload)


def on_ranks(world_size: int, act: Callable[[SimulatedGroup], Any]) -> list[Any]:
    """What ``act`` returned or raised on each rank."""
    meeting, results = _Meeting(world_size), list[Any]([None] * world_size)

    def run(rank: int) -> None:
        try:
            info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
            results[rank] = act(SimulatedGroup(info, meeting))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    return results
