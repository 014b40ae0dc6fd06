"""All-reduce, residual sum and norm: one operation of the model, one kernel or two."""

from __future__ import annotations

from typing import Protocol

import torch

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import has_triton
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.symmetric_memory import SymmetricCommunicator


class AddNorm(Protocol):
    """As ``layer_ops.add_norm``; or of the sum of all ranks' ``x`` (N, size), which may be overwritten."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /
    ) -> torch.Tensor: ...


def reduce_add_norm(communicator: Communicator, add_norm: AddNorm) -> AddNorm:
    """``add_norm`` of the ranks' sum: fused where the communicator has shared memory and is told to, else composed."""
    if communicator.info.world_size == 1:
        return add_norm
    if isinstance(communicator, SymmetricCommunicator) and communicator.fuses_norm and has_triton():
        return Fused(communicator, add_norm)
    return Composed(communicator, add_norm)


class Composed:
    """An all-reduce, then the norm: the oracle of the fused kernel."""

    def __init__(self, communicator: Communicator, add_norm: AddNorm) -> None:
        self._communicator, self._add_norm = communicator, add_norm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /) -> torch.Tensor:
        return self._add_norm(self._communicator.all_reduce(x), residual, rule, scale)


class Fused:
    """One kernel for tensors that are all-reduced in one shot, ``Composed`` for larger ones."""

    def __init__(self, communicator: SymmetricCommunicator, add_norm: AddNorm) -> None:
        from tp_engine.kernels.reduce_norm_triton import all_reduce_add_norm_triton

        self._communicator = communicator
        self._composed = Composed(communicator, add_norm)
        self._kernel = all_reduce_add_norm_triton

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /) -> torch.Tensor:
        communicator = self._communicator
        if not communicator.begins_one_shot(x):
            return self._composed(x, residual, rule, scale)
        buffer, rank = communicator.buffer, communicator.info.rank
        return self._kernel(x, residual, rule, scale, buffers=buffer.addresses, signals=buffer.signals, rank=rank)
