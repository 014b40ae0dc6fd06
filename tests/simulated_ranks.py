"""The ranks of tests that run in one process: threads (``tp_engine/distributed/thread_ranks.py``)."""

from __future__ import annotations

import torch

from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.thread_ranks import Meeting, run_ranks
from tp_engine.distributed.thread_ranks import ThreadCommunicator as SimulatedCommunicator

__all__ = ["Meeting", "NotingCommunicator", "SimulatedCommunicator", "run_ranks"]


class NotingCommunicator(SimulatedCommunicator):
    """Notes the bytes of each all-reduce and of each part that is all-gathered, as sums of parts are on GPUs."""

    def __init__(self, other: Communicator) -> None:
        assert isinstance(other, SimulatedCommunicator)
        super().__init__(other.info, other.meeting)
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
