"""Several ranks in one process: each is a thread, and their collectives meet at a barrier.

Sums are taken in rank order, so results do not depend on which thread comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tp_engine.distributed.collectives import Communicator
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.linear.tree_sum import tree_sum

T = TypeVar("T")
DEADLINE_S = 60.0


class _Meeting:
    """The place where the ranks of one world exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
        self.posted: list[torch.Tensor | None] = [None] * world_size
        self.memories = [torch.zeros(1000, dtype=torch.uint8) for _ in range(world_size)]

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, copied, in rank order."""
        self.posted[rank] = tensor.clone()
        self.barrier.wait()
        found = [other for other in self.posted if other is not None]
        self.barrier.wait()
        return found


class SimulatedCommunicator(Communicator):
    """One rank's end of a world of threads."""

    def __init__(self, info: RankInfo, meeting: _Meeting) -> None:
        self.info = info
        self._meeting = meeting
        self.memories = meeting.memories  # shared by all ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.exchange(self.info.rank, tensor)
        return tensor.copy_(torch.stack(parts).sum(0))

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tree_sum(self._meeting.exchange(self.info.rank, part)).to(dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.info.rank, tensor), dim=-1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = SimulatedCommunicator.all_gather(self, tensor)
        return gathered if self.info.is_first else None


class NotingCommunicator(SimulatedCommunicator):
    """Notes the bytes of each all-reduce and of each part that is all-gathered, as sums of parts are on GPUs."""

    def __init__(self, other: Communicator) -> None:
        assert isinstance(other, SimulatedCommunicator)
        super().__init__(other.info, other._meeting)
        self.reduced: list[int] = []
        self.gathered: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor.nbytes)
        return super().all_reduce(tensor)

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.gathered.append(part.nbytes)
        return super().tree_reduce(part, dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gathered.append(tensor.nbytes)
        return super().all_gather(tensor)


def run_ranks(world_size: int, body: Callable[[Communicator], T]) -> list[T]:
    """Call ``body`` once per rank, at the same time; returns the results in rank order.

    One rank's exception breaks the barrier, so that the others end too; that rank's error is raised.
    """
    meeting = _Meeting(world_size)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        try:
            return body(SimulatedCommunicator(info, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
