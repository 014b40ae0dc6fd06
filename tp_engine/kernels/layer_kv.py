"""One layer's keys and values in the paged cache: its layout, its 8-bit form, and the store, in plain PyTorch.

::

    cache    (2, blocks, block_size, KV heads, head_dim)   keys at 0, values at 1
    scales   (2, blocks, KV heads, block_size) float32     only of a quantised cache, which is int8 or float8_e4m3fn

    element = cache[part, block, offset, head, d] * scales[part, block, head, offset]

The scale of a head's vector is its largest magnitude over the type's largest value, so nothing saturates and a token's
K/V depends on that token alone.  Offsets are the scales' last dimension because kernels read a block's scales together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SCALE_DTYPE = torch.float32
# The largest value of each quantised type.
LARGEST_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KeyValue(NamedTuple):
    """A step's new keys and values of one layer, each (N, KV heads, head_dim)."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """One layer's paged cache; see the module's text for the shapes."""

    cache: torch.Tensor
    scales: torch.Tensor | None = None


def store_kv(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """Store token i's key and value at slot ``slot_mapping[i]``; a negative slot is skipped.

    ``new``, of any float dtype, (N, KV heads, head_dim) each; ``slot_mapping`` (N,) int64, without repeated slots.
    """
    kept = tokens_to_store(slot_mapping)
    if kept is None:
        scatter_kv(new, kv, slot_mapping)
    else:
        scatter_kv(KeyValue(new.key[kept], new.value[kept]), kv, slot_mapping[kept])


def tokens_to_store(slot_mapping: torch.Tensor) -> torch.Tensor | None:
    """Indices of the tokens that are not padding, or None if there is no padding.  Waits for the device."""
    stored = slot_mapping >= 0
    return None if bool(stored.all()) else stored.nonzero().squeeze(1)


def scatter_kv(new: KeyValue, kv: LayerKv, slots: torch.Tensor) -> None:
    """``store_kv`` for slots (N,) int64 without padding."""
    width = new.key.shape[1] * new.key.shape[2]
    for part, states in enumerate(new):
        cache = kv.cache[part]
        if kv.scales is None:
            cache.view(-1, width).index_copy_(0, slots, states.reshape(-1, width).to(cache.dtype))
            continue
        values, scales = quantise(states, cache.dtype)
        # As bytes, because index_copy_ knows no 8-bit floats.
        cache.view(torch.uint8).view(-1, width).index_copy_(0, slots, values.view(torch.uint8).view(-1, width))
        block_size = cache.shape[1]
        kv.scales[part][slots // block_size, :, slots % block_size] = scales


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
