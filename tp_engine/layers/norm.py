"""Root mean square normalisation (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.layers.context import LayerContext


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self._shape, self._eps = (size,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to ``residual``, in place, and return the normalised sum."""
        return F.rms_norm(residual.add_(x), self._shape, self.weight, self._eps)


class QKNorm(nn.Module):
    """Normalise every query and key head on its own, queries with one weight and keys with another (Qwen3).

    Both are done at once on (N, heads + KV heads, head_dim): normalise all, then multiply by a weight per head.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.q_weight: nn.Parameter = context.empty(head_dim)
        self.k_weight: nn.Parameter = context.empty(head_dim)
        self._counts, self._shape, self._eps = (num_heads, num_kv_heads), (head_dim,), eps
        self._weights: torch.Tensor | None = None

    def finish_loading(self) -> None:
        """Lay out the weight of each head, (heads + KV heads, head_dim)."""
        self._weights = self._expand()

    def _expand(self) -> torch.Tensor:
        num_heads, num_kv_heads = self._counts
        return torch.cat((self.q_weight.expand(num_heads, -1), self.k_weight.expand(num_kv_heads, -1)))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        weights = self._weights if self._weights is not None else self._expand()
        return F.rms_norm(heads, self._shape, None, self._eps).mul_(weights)
