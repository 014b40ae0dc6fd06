"""Rotary position embedding (https://arxiv.org/abs/2104.09864), in the half-split order of transformers' Llama.

If the pairs of a checkpoint are neighbours, the rows of its query and key projections are reordered when they are read
(``interleaved_to_halves``), so that every model rotates in the same way: scores are sums over pairs, in any order.
"""

import math
from functools import partial

import torch
from torch import nn

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.model_config.rope import RopeSpec
from tp_engine.weights.source import Decode, as_stored


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position, computed once in float32 and kept in ``dtype``."""

    table: torch.Tensor
    query_scale: torch.Tensor | None
    axes: torch.Tensor | None

    def __init__(self, spec: RopeSpec, max_model_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(spec, max_model_len)[: spec.num_pairs])
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.attention_factor
        self.register_buffer("table", table.to(device, dtype), persistent=False)
        scale = None
        if spec.query_beta:
            periods = torch.floor(positions / spec.original_max_position)
            scale = (1 + spec.query_beta * torch.log(1 + periods)).to(device)
        self.register_buffer("query_scale", scale, persistent=False)
        axes = torch.tensor(spec.axes, dtype=torch.int64, device=device) if spec.sections else None
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at ``positions`` (N,) int64, or at (3, N), time, row and column, of which each pair is
        rotated by one (M-RoPE), without sections by time alone."""
        if positions.dim() == 2 and self.axes is None:
            positions = positions[0]
        if positions.dim() == 1:
            return Rotation(self.table, positions, self.query_scale)
        assert self.axes is not None and self.query_scale is None
        own, pairs = positions[self.axes].T, torch.arange(len(self.axes), device=positions.device, dtype=torch.int64)
        table = torch.cat((self.table[own, pairs], self.table[own, pairs + len(pairs)]), 1)
        return Rotation(table, torch.arange(len(table), device=positions.device, dtype=torch.int64))


def order_of(spec: RopeSpec | None, head_dim: int) -> Decode:
    """The decoding of the stored rows of query and key heads."""
    if spec is not None and spec.is_interleaved:
        return partial(interleaved_to_halves, head_dim=head_dim, rotary_dim=spec.rotary_dim)
    if spec is not None and 2 * spec.num_pairs < spec.rotary_dim:
        return partial(rotated_first, head_dim=head_dim, num_pairs=spec.num_pairs)
    return as_stored


def interleaved_to_halves(values: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Rows of whole heads, ``values`` (heads * head_dim, ...): the rotated elements (a0 b0 a1 b1 ...) of each head
    become (a0 a1 ... b0 b1 ...)."""
    rest = values.shape[1:]
    heads = values.reshape(-1, head_dim, *rest)
    rotated = heads[:, :rotary_dim].reshape(len(heads), -1, 2, *rest).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, heads[:, rotary_dim:]), 1).flatten(0, 1)


def rotated_first(values: torch.Tensor, head_dim: int, num_pairs: int) -> torch.Tensor:
    """Rows of whole heads, ``values`` (heads * head_dim, ...), of which ``num_pairs`` pairs are rotated, those at the
    beginning of both halves of a head: these come first, as in a partial rotation."""
    heads = values.reshape(-1, head_dim, *values.shape[1:])
    first, second = heads.chunk(2, 1)
    parts = (first[:, :num_pairs], second[:, :num_pairs], first[:, num_pairs:], second[:, num_pairs:])
    return torch.cat(parts, 1).flatten(0, 1)


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> torch.Tensor:
    """Radians per position of each pair, (rotary_dim / 2,) float32, with the scaling rule applied."""
    if spec.kind == "given":
        return torch.tensor(spec.frequencies, dtype=torch.float32, device="cpu")
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu") / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies)
    if spec.kind == "yarn":
        return _yarn(spec, frequencies)
    if spec.kind == "longrope":
        # One choice for all positions: cached keys must not depend on how long their request becomes.
        is_long = max_model_len > spec.original_max_position
        return frequencies / torch.tensor(
            spec.long_factor if is_long else spec.short_factor, dtype=torch.float32, device="cpu"
        )
    if spec.kind == "proportional":
        frequencies[spec.num_pairs :] = 0.0
        return frequencies / spec.factor
    return frequencies


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between blended.

    The rule and its names are those of Meta's reference code (models/llama3, apply_scaling).
    """
    wavelengths = 2 * math.pi / frequencies
    longest_kept = spec.original_max_position / spec.high_freq_factor
    shortest_slowed = spec.original_max_position / spec.low_freq_factor
    blend = (spec.original_max_position / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - blend) * frequencies / spec.factor + blend * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / spec.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)


def _yarn(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): pairs that turn ``beta_fast`` times or more within the
    original context are kept, pairs that turn ``beta_slow`` times or less are slowed by ``factor``, others blended."""
    dim = spec.rotary_dim

    def pair_that_turns(times: float) -> float:
        return dim * math.log(spec.original_max_position / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    slowed = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return frequencies / spec.factor * slowed + frequencies * (1 - slowed)
