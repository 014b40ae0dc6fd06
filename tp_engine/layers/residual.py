"""From one block to the next: all-reduce, sum with the residual stream, norm; in one kernel or several."""

from __future__ import annotations

from typing import Protocol

import torch

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import has_triton
from tp_engine.layers.context import LayerContext
from tp_engine.layers.norm import Norm
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.symmetric_memory import SymmetricCommunicator


class Join:
    """Adds a block's output to the residual stream and normalises the stream for the next block.

    ``out_norm`` normalises the ranks' sum of the output, which is multiplied by ``scale`` when it is added;
    ``next_norm`` normalises the stream.  Either may be None.  Without ``out_norm``, all-reduce, sum and norm are one
    operation.
    """

    def __init__(self, out_norm: Norm | None, next_norm: Norm | None, scale: float, *, context: LayerContext) -> None:
        self._out_norm, self._next_norm, self._scale = out_norm, next_norm, scale
        self._communicator = context.communicator
        self._add, self._add_norm = context.op("add"), context.op("add_norm")
        self._reduce_add_norm = reduce_add_norm(context.communicator, self._add_norm)
        self.is_recordable = context.can_record("add", "add_norm")

    def __call__(self, part: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Add ``part`` (N, hidden), this rank's part of the block's output, to ``residual`` in place.

        Returns what the next block reads.  Before the first block there is no part.  A collective; ``part`` may be
        overwritten.
        """
        out_norm, next_norm = self._out_norm, self._next_norm
        if part is None:
            return residual if next_norm is None else next_norm(residual)
        if out_norm is None and next_norm is not None:
            return self._reduce_add_norm(part, residual, next_norm.rule, self._scale)
        output = self._communicator.all_reduce(part)
        if out_norm is not None:
            output = out_norm(output)
        if next_norm is None:
            self._add(output, residual, self._scale)
            return residual
        joined: torch.Tensor = self._add_norm(output, residual, next_norm.rule, self._scale)
        return joined


class AddNorm(Protocol):
    """As ``layer_ops.add_norm``, of ``x`` (N, size) or of the ranks' sum of it; ``x`` may be overwritten."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, /
    ) -> torch.Tensor: ...


def reduce_add_norm(communicator: Communicator, add_norm: AddNorm) -> AddNorm:
    """``add_norm`` of the ranks' sum: fused if the communicator has shared memory and ``fuses_norm``, else composed."""
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
    """One kernel for tensors that are all-reduced in one shot, ``Composed`` for larger tensors."""

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
