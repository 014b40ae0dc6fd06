"""Root mean square normalisation in plain PyTorch, the twin of ``norm_triton``.

``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467); the mean is taken in
float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` (N, size), ``weight`` (size,) -> (N, size), in the type of ``x``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``x`` to ``residual`` (both (N, size)), in place, and return the normalised sum."""
    return F.rms_norm(residual.add_(x), weight.shape, weight, eps)
