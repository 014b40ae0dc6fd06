"""Several ranks in one process: each is a thread, and their collectives meet at a barrier.

Sums are taken in rank order, so results do not depend on which thread comes first.  What is checked before a model is
served, and tests, run on such ranks.
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


class Meeting:
    """The place where the ranks of one world exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
        self.posted: list[torch.Tensor | None] = [None] * world_size
        self.memories = [torch.zeros(1000, dtype=torch.uint8, device="cpu") for _ in range(world_size)]

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, copied, in rank order."""
        self.posted[rank] = tensor.clone()
        self.barrier.wait()
        found = [other for other in self.posted if other is not None]
        self.barrier.wait()
        return found


class ThreadCommunicator(Communicator):
    """One rank's end of a world of threads."""

    def __init__(self, info: RankInfo, meeting: Meeting) -> None:
        self.info, self.meeting = info, meeting
        self.memories = meeting.memories  # shared by all ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.exchange(self.info.rank, tensor)
        return tensor.copy_(torch.stack(parts).sum(0))

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tree_sum(self.meeting.exchange(self.info.rank, part)).to(dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.info.rank, tensor), dim=-1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        gathered = ThreadCommunicator.all_gather(self, tensor)
        return gathered if self.info.is_first else None


def run_ranks(world_size: int, body: Callable[[Communicator], T]) -> list[T]:
    """Call ``body`` once per rank, at the same time; returns the results in rank order.

    One rank's exception breaks the barrier, so that the others end too; that rank's error is raised.
    """
    meeting = Meeting(world_size)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        try:
            return body(ThreadCommunicator(info, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
