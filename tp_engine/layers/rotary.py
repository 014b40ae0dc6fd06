"""Rotary position embedding (https://arxiv.org/abs/2104.09864), in the half-split order of transformers' Llama."""

from __future__ import annotations

import math

import torch
from torch import nn

from tp_engine.kernels.rope import Rotation
from tp_engine.model_config.rope import RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position, computed once in float32, kept in ``dtype``."""

    table: torch.Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_model_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("table", table.to(device, dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """How the heads of tokens at ``positions`` (N,) int64 turn."""
        return Rotation(self.table, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, (head_dim / 2,) float32, with the scaling rule applied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves longer than the original context are slowed by ``factor``, short ones kept, others blended.

    The rule and its names are those of Meta's reference code (models/llama3, apply_scaling).
    """
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_slowed = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)
