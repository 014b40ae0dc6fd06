"""The collectives that layers call, behind one interface.

NCCL on CUDA, gloo on CPUs or through the host, the identity for one rank.  ``all_reduce.py`` has the table of ways to
all-reduce, among them shared and symmetric memory in front of these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic_ns
from typing import TypeAlias

import torch
import torch.distributed as dist

from tp_engine.distributed.reduce_plan import RecordedSizes
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.tree_sum import tree_sum

# Renamed in newer versions of torch.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

AddNorm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, NormRule, float, float], torch.Tensor]
"""``layer_ops.add_norm``."""


class Communicator(ABC):
    """Collectives over the tensor-parallel ranks.  Every rank calls the same collectives in the same order.

    ``can_capture``: a recorded step (a CUDA graph, or a tape on CPUs) may contain them, of any size.
    """

    info: RankInfo
    can_capture = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns ``tensor``."""

    def all_reduce_add_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        rule: NormRule,
        scale: float,
        stream_scale: float,
        add_norm: AddNorm,
    ) -> torch.Tensor:
        """Return ``add_norm`` of the sum over ranks of ``part``, which may be overwritten."""
        return add_norm(self.all_reduce(part), residual, rule, scale, stream_scale)

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the ranks' parts, contiguous float32, by ``tree_sum``, rounded once to ``dtype``."""
        parts = self.all_gather(part.view(-1)).view(self.info.world_size, *part.shape)
        return tree_sum(parts.unbind(0)).to(dtype)

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors along the last dimension, in rank order."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Like ``all_gather``, but only rank 0 gets the result; None on other ranks."""

    def why_not_capture(self, sizes: RecordedSizes) -> str | None:
        """Why a recorded step may not contain the collectives of ``sizes``; None if it may."""
        if self.can_capture:
            return None
        return (
            "the ranks' collectives cannot be captured; they can with NCCL, one GPU per rank, or with "
            "all_reduce_backend=symm_mem"
        )


class SingleRank(Communicator):
    """A world of one: every collective is the identity."""

    can_capture = True

    def __init__(self) -> None:
        self.info = RankInfo()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def tree_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return part.to(dtype)

    all_gather = gather = all_reduce


class ProcessGroupCommunicator(Communicator):
    """Collectives through a torch.distributed process group (NCCL or gloo).

    gloo's collectives have ended when they return, so their time, with the wait for other ranks, is recorded.
    """

    def __init__(self, info: RankInfo, group: dist.ProcessGroup, progress: RankProgress) -> None:
        self.info = info
        self.can_capture = dist.get_backend(group) == "nccl"
        self._group = group
        self._progress = progress
        self._collected = _nothing if self.can_capture else progress.collected

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._run(dist.all_reduce, tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:  # 1-D parts need no rearranging, so no copy
            whole = tensor.new_empty(self.info.world_size * len(tensor))
            self._run(_all_gather_flat, whole, tensor.contiguous())
            return whole
        parts = self._parts(tensor)
        self._run(dist.all_gather, parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._parts(tensor) if self.info.is_first else None
        self._run(dist.gather, tensor.contiguous(), parts, group_dst=0)
        return torch.cat(parts, dim=-1) if parts is not None else None

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.info.world_size)]

    def _run(self, collective: Callable[..., object], *arguments: object, **options: int) -> None:
        self._progress.collective()
        started_ns = monotonic_ns()
        collective(*arguments, group=self._group, **options)
        self._collected(started_ns)


def _nothing(_started_ns: int) -> None:
    """Record nothing: on devices the host only launches the collectives, so it cannot measure them."""
