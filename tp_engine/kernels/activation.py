"""An MLP's gate and up multiplied, in plain PyTorch: the twin of ``activation_triton``.

::

    silu            silu(gate) * up                                    SwiGLU, https://arxiv.org/abs/2002.05202
    gelu_tanh       gelu(gate), by its tanh formula, * up
    swiglu_clamped  (u + 1) * g * sigmoid(alpha * g)                   g = min(gate, limit), u = up within +-limit
    relu2           max(gate, 0)^2 * up

The activated gate is rounded before the product, as the models' own code does; ``swiglu_clamped`` is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tp_engine.kernels.widening import widened
from tp_engine.model_config.activation import Activation


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """(N, 2 * size), gate then up, -> (N, size)."""
    first, up = gate_up.chunk(2, -1)
    if activation.kind == "swiglu_clamped":
        return _clamped(widened(first), widened(up), activation).to(gate_up.dtype)
    return _activated(first, activation).mul_(up)


def _activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gate alone, rounded to its type; a new tensor."""
    if activation.kind == "silu":
        return F.silu(gate)
    if activation.kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    return F.relu(gate).square_()


def _clamped(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    bounded = gate.clamp(max=activation.limit)
    return (up.clamp(-activation.limit, activation.limit) + 1) * bounded * (bounded * activation.alpha).sigmoid()
