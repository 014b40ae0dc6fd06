"""From one block to the next: the output of the one is added to the residual stream, and normalised for the other."""

from __future__ import annotations

import torch

from tp_engine.layers.context import LayerContext
from tp_engine.layers.norm import Norm
from tp_engine.layers.reduce_norm import reduce_add_norm


class Join:
    """``out_norm`` of the ranks' sum of a block's output; that added to the stream; ``next_norm`` of the stream.

    Either may be None.  The output is multiplied by ``scale`` when it is added.  Without ``out_norm``, all-reduce,
    sum and norm are one operation.
    """

    def __init__(self, out_norm: Norm | None, next_norm: Norm | None, scale: float, *, context: LayerContext) -> None:
        self._out_norm, self._next_norm, self._scale = out_norm, next_norm, scale
        self._communicator = context.communicator
        self._add, self._add_norm = context.op("add"), context.op("add_norm")
        self._reduce_add_norm = reduce_add_norm(context.communicator, self._add_norm)
        self.is_recordable = context.can_record("add", "add_norm")

    def __call__(self, part: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """``part`` (N, hidden), this rank's part of the block's output, is added to ``residual`` in place; what the
        next block reads.  Before the first block there is no part.  A collective; ``part`` may be overwritten."""
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
