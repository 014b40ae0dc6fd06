"""The quantised KV cache: one byte per element, and one scale per token and KV head.

::

    kv_cache   (2, blocks, block_size, KV heads, head_dim)   int8 or float8_e4m3fn, one layer's keys and values
    kv_scales  (2, blocks, KV heads, block_size)             float32

    element = kv_cache[part, block, offset, head, d] * kv_scales[part, block, head, offset]

The scale of a head's vector is its largest magnitude over the type's largest value, so nothing saturates and a token's
K/V depends on that token alone.  Offsets are the scales' last dimension because kernels read a block's scales together.
"""

from __future__ import annotations

import torch

SCALE_DTYPE = torch.float32
# The largest value that each quantised type is used to.
LARGEST_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of ``dtype`` has scales beside it."""
    return dtype in LARGEST_VALUE


def quantise(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``states`` (..., head_dim) as values (..., head_dim) of ``dtype`` and scales (...) float32.

    Rounds to the nearest, ties to even.  A vector of zeros has scale 0.
    """
    exact = states.float()
    largest = LARGEST_VALUE[dtype]
    peak = exact.abs().amax(-1)
    inverse = torch.where(peak > 0, largest / peak, 0.0)
    scaled = (exact * inverse.unsqueeze(-1)).clamp_(-largest, largest)
    values = scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return values, peak / largest


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The states (..., head_dim) float32 of values (..., head_dim) and scales (...)."""
    return values.float() * scales.unsqueeze(-1)


def scales_at(kv_scales: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Scales (slots, KV heads) of one part, ``kv_scales`` (blocks, KV heads, block_size), at ``slots`` (n,)."""
    block_size = kv_scales.shape[2]
    return kv_scales[slots // block_size, :, slots % block_size]
