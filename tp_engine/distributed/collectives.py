"""The collectives that layers call, behind one interface.

NCCL on CUDA, gloo on CPU, the identity for one rank.  ``groups.py`` adds gloo through the host, shared memory and
symmetric memory.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Protocol

import torch
import torch.distributed as dist

from tp_engine.distributed.rank import RankInfo
from tp_engine.kernels.linear.tree_sum import tree_sum
from tp_engine.progress import RankProgress

# Newer versions of torch have renamed it.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator(Protocol):
    """Collectives over the tensor-parallel ranks.  Every rank calls the same collectives in the same order.

    ``can_capture``: a recorded step may contain them (a CUDA graph, or a tape on CPUs), of any size.
    """

    info: RankInfo
    can_capture: bool

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns ``tensor``."""

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The ranks' parts, contiguous float32, added as ``tree_sum`` does and rounded once to ``dtype``."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors along the last dimension, in rank order."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Like ``all_gather``, but only rank 0 gets the result; None on other ranks."""


class SingleRank:
    """A world of one: every collective is the identity."""

    can_capture = True

    def __init__(self) -> None:
        self.info = RankInfo()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return part.to(dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor


class ProcessGroupCommunicator:
    """Collectives through a torch.distributed process group (NCCL or gloo).

    gloo's collectives have ended when they return, so their time, including the wait for other ranks, is recorded.
    """

    def __init__(self, info: RankInfo, group: dist.ProcessGroup, progress: RankProgress) -> None:
        self.info = info
        self.can_capture = dist.get_backend(group) == "nccl"
        self._group = group
        self._progress = progress
        self._collected = _nothing if self.can_capture else progress.collected

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._progress.collective()
        started_ns = monotonic_ns()
        dist.all_reduce(tensor, group=self._group)
        self._collected(started_ns)
        return tensor

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tree_of_gathered(self, part, dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._progress.collective()
        started_ns = monotonic_ns()
        if tensor.dim() == 1:  # 1-D parts need no rearranging, so no copy
            whole = tensor.new_empty(self.info.world_size * len(tensor))
            _all_gather_flat(whole, tensor.contiguous(), group=self._group)
            self._collected(started_ns)
            return whole
        parts = [torch.empty_like(tensor) for _ in range(self.info.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        self._collected(started_ns)
        return torch.cat(parts, dim=-1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self._progress.collective()
        started_ns = monotonic_ns()
        parts = [torch.empty_like(tensor) for _ in range(self.info.world_size)] if self.info.is_first else None
        dist.gather(tensor.contiguous(), parts, group=self._group, group_dst=0)
        self._collected(started_ns)
        return torch.cat(parts, dim=-1) if parts is not None else None


def tree_of_gathered(communicator: Communicator, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``Communicator.tree_reduce`` by an all-gather."""
    parts = communicator.all_gather(part.view(-1)).view(communicator.info.world_size, *part.shape)
    return tree_sum(parts.unbind(0)).to(dtype)


def _nothing(_started_ns: int) -> None:
    """For devices: the host only launches their collectives, so it can not measure them."""
