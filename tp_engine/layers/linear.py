"""Linear layers that are split over the ranks (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

::

    column parallel            row parallel
    W (out, in), W = [W0]      W = [W0 | W1]       rank r holds Wr
                     [W1]
    y = [x W0' | x W1']        y = x0 W0' + x1 W1'
    every rank has all of x    every rank has its columns of x; all-reduce
    and gets its columns of y  gives everyone all of y

A column-parallel layer followed by a row-parallel one needs a single all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear_method import LinearMethod, PlainLinear, ThenGate
from tp_engine.model_config.activation import SILU, Activation


class LocalLinear(nn.Module):
    """This rank's part of a linear layer: ``weight`` (out_size, in_size), perhaps another layer's, and ``bias``.

    ``make_method`` prepares the weight, instead of the context's ``make_linear``.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        context: LayerContext,
        weight: nn.Parameter | None = None,
        make_method: Callable[[torch.Tensor], LinearMethod] | None = None,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = context.empty(out_size, in_size) if weight is None else weight
        self.bias = context.empty(out_size) if bias else None
        self._method: LinearMethod = PlainLinear(self.weight)
        self._make_method = make_method or context.make_linear

    def finish_loading(self) -> None:
        """Prepare the loaded weight for fast products; its plain form is given up where they no longer need it."""
        assert self.weight is not None, "finish_loading was called twice"
        self._method = self._make_method(self.weight)
        if not self._method.needs_weight:
            self.weight = None

    @property
    def is_recordable(self) -> bool:
        """Whether a tape can hold the product, as it is compiled code."""
        return self._method.is_native


class GatedColumnParallelLinear(LocalLinear):
    """Gate and up of an MLP multiplied (kernels/activation.py): (N, in) -> (N, size / world size); a rank holds its
    share of both.

    ::

        rank 0: [gate 0 | up 0]    rank 1: [gate 1 | up 1]
    """

    def __init__(
        self, in_size: int, size: int, *, bias: bool, context: LayerContext, activation: Activation = SILU
    ) -> None:
        super().__init__(
            in_size,
            2 * context.share(size),
            bias=bias,
            context=context,
            make_method=lambda weight: context.make_gated(weight, activation),
        )
        self._method = ThenGate(self._method, activation, context.device.type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._method(x, self.bias)


class QKVParallelLinear(LocalLinear):
    """Query, key and value projections as one product.

    Where there are fewer KV heads than ranks, each KV head is held by several ranks::

        8 query heads, 2 KV heads, 4 ranks:   rank 0 [q0 q1 k0 v0]   rank 1 [q2 q3 k0 v0]   rank 2 [q4 q5 k1 v1] ...

    ``num_heads`` and ``num_kv_heads`` are this rank's.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool, context: LayerContext
    ) -> None:
        local_heads = context.share(num_heads)
        local_kv_heads = max(1, num_kv_heads // context.communicator.info.world_size)
        out_size = (local_heads + 2 * local_kv_heads) * head_dim
        super().__init__(hidden_size, out_size, bias=bias, context=context)
        self.num_heads, self.num_kv_heads = local_heads, local_kv_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, hidden) -> (N, (heads + 2 KV heads) * head_dim): all query heads, then the keys', then the values'."""
        return self._method(x, self.bias)


class RowParallelLinear(LocalLinear):
    """(N, in / world size) -> (N, out), summed over the ranks; the bias is added by rank 0 alone, hence once."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__(context.share(in_size), out_size, bias=bias, context=context)
        self._communicator = context.communicator
        self._adds_bias = bias and context.communicator.info.is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce(self.part(x))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """(N, out) of this rank, of which the ranks' sum is the layer's output, for who adds them up; no collective."""
        return self._method(x, self.bias if self._adds_bias else None)
