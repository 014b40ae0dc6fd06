"""A linear layer with what stands around it in a decoder, in plain PyTorch: the twin of the fused products in Triton.

::

    stream += scale * activation( norm(x) W^T + bias )         each of norm, bias, activation and stream may be missing

The fused products round ``x * gain`` once (the product of one row: never), the result once, and nothing between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import NormRule, add, gate, norm
from tp_engine.model_config.mlp import Activation


@dataclass(frozen=True, slots=True, eq=False)
class RowsToNorm:
    """Rows ``x`` (N, size) that the products which read them normalise by ``rule``."""

    x: torch.Tensor
    rule: NormRule

    def __len__(self) -> int:
        return len(self.x)


def fused_linear(
    x: torch.Tensor | RowsToNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    *,
    stream: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """``x`` (N, in) by ``weight`` (out, in) -> (N, out); with an ``activation``, of gate and up, (N, out / 2).

    With a ``stream`` of the result's shape, ``scale`` times the result is added to it in place, and it is returned.
    """
    rows = norm(x.x, x.rule) if isinstance(x, RowsToNorm) else x
    out = F.linear(rows, weight, bias)
    out = out if activation is None else gate(out, activation)
    if stream is None:
        return out
    add(out, stream, scale)
    return stream
