"""Normalisation and the residual sum in plain PyTorch, the twins of ``norm_triton``.

::

    RMS norm    x / sqrt(mean(x^2) + eps) * (weight + offset)                https://arxiv.org/abs/1910.07467
    centred     the same of x - mean(x): layer norm without a bias           https://arxiv.org/abs/1607.06450

over the last dimension; everything is computed in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.widening import widened


@dataclass(frozen=True, slots=True, eq=False)
class NormRule:
    """How rows are normalised: ``weight`` (size,); ``offset`` is added to it; ``is_centred`` takes the mean off."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0
    is_centred: bool = False


def norm(x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    """``x`` (N, size) -> (N, size), in the type of ``x``."""
    if not (rule.offset or rule.is_centred):
        return F.rms_norm(x, rule.weight.shape, rule.weight, rule.eps)
    wide = widened(x)
    if rule.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + rule.eps).rsqrt()
    return (scaled * (widened(rule.weight) + rule.offset)).to(x.dtype)


def add(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> None:
    """Add ``x * scale`` to ``residual`` (both (N, size)), in place; rounded once."""
    if scale == 1.0:
        residual.add_(x)
    else:
        residual.copy_(widened(residual) + widened(x) * scale)


def add_norm(x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0) -> torch.Tensor:
    """Add ``x * scale`` to ``residual`` (both (N, size)), in place, and return the normalised sum."""
    add(x, residual, scale)
    return norm(residual, rule)
