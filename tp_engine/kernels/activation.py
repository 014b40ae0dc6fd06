"""Activations in plain PyTorch, the twins of ``activation_triton``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product (https://arxiv.org/abs/2002.05202): (N, 2 * size), gate then up, -> (N, size)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
