"""Root mean square normalisation (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
from torch import nn

from tp_engine.kernels.norm import NormRule
from tp_engine.kernels.ops import is_recordable, op
from tp_engine.kernels.rope import HeadNorm
from tp_engine.layers.context import LayerContext
from tp_engine.layers.reduce_norm import reduce_add_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; the mean is taken in float32.

    ``is_recordable``: whether a tape can hold it.
    """

    def __init__(self, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self._rule = NormRule(self.weight, eps)
        self.is_recordable = all(is_recordable(name, context.device.type) for name in ("norm", "add_norm"))
        self._norm, self._add_norm = (op(name, context.device.type) for name in ("norm", "add_norm"))
        self._reduce_add_norm = reduce_add_norm(context.communicator, self._add_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self._norm(x, self._rule)
        return normalised

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to ``residual``, in place, and return the normalised sum."""
        normalised: torch.Tensor = self._add_norm(x, residual, self._rule)
        return normalised

    def reduce_add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``add_and_norm`` with the ranks' sum of ``x``, this rank's part, which may be overwritten; a collective."""
        return self._reduce_add_norm(x, residual, self._rule)


class QKNorm(nn.Module):
    """The weights that normalise every query and key head on its own, one for queries and one for keys (Qwen3)."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.q_weight: nn.Parameter = context.empty(head_dim)
        self.k_weight: nn.Parameter = context.empty(head_dim)
        self._counts, self._eps = (num_heads, num_kv_heads), eps
        self._head_norm: HeadNorm | None = None

    def finish_loading(self) -> None:
        """Lay the weights out, once they have their values."""
        self._head_norm = self._lay_out()

    @property
    def head_norm(self) -> HeadNorm:
        """The weight of each head."""
        return self._lay_out() if self._head_norm is None else self._head_norm

    def _lay_out(self) -> HeadNorm:
        num_heads, num_kv_heads = self._counts
        weights = torch.cat((self.q_weight.expand(num_heads, -1), self.k_weight.expand(num_kv_heads, -1)))
        return HeadNorm(q_weight=self.q_weight, k_weight=self.k_weight, weights=weights, eps=self._eps)
