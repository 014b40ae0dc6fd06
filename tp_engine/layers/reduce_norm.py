"""All-reduce, residual sum and norm: one operation of the model, one kernel or two."""

from __future__ import annotations

from typing import Protocol

import torch

from tp_engine.dist.collectives import Communicator
from tp_engine.dist.symmetric_memory import SymmetricCommunicator
from tp_engine.kernels.layer_ops import LayerOps
from tp_engine.kernels.triton_support import has_triton


class ReduceAddNorm(Protocol):
    """``norm.add_rms_norm`` of the sum over ranks of ``x`` (N, size), each rank's part, which may be overwritten."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor: ...


def reduce_add_norm(communicator: Communicator, ops: LayerOps) -> ReduceAddNorm:
    """The fused kernel where the communicator has shared memory and is told to fuse; else one after the other."""
    if communicator.info.world_size == 1:
        return ops.add_rms_norm
    if isinstance(communicator, SymmetricCommunicator) and communicator.fuses_norm and has_triton():
        return Fused(communicator, ops)
    return Composed(communicator, ops)


class Composed:
    """An all-reduce, then the norm: the oracle of the fused kernel."""

    def __init__(self, communicator: Communicator, ops: LayerOps) -> None:
        self._communicator, self._ops = communicator, ops

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._ops.add_rms_norm(self._communicator.all_reduce(x), residual, weight, eps)


class Fused:
    """One kernel for tensors that are all-reduced in one shot, ``Composed`` for larger ones."""

    def __init__(self, communicator: SymmetricCommunicator, ops: LayerOps) -> None:
        from tp_engine.kernels.reduce_norm_triton import all_reduce_add_rms_norm_triton

        self._communicator = communicator
        self._composed = Composed(communicator, ops)
        self._kernel = all_reduce_add_rms_norm_triton

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        communicator = self._communicator
        if not communicator.begins_one_shot(x):
            return self._composed(x, residual, weight, eps)
        buffer, rank = communicator.buffer, communicator.info.rank
        return self._kernel(x, residual, weight, eps, buffers=buffer.addresses, signals=buffer.signals, rank=rank)
