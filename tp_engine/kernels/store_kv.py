"""Write new keys and values into the paged cache: plain PyTorch, the twin of the Triton kernels that store."""

from __future__ import annotations

import torch

from tp_engine.kernels.kv_quant import quantise


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store token i's key and value at slot ``slot_mapping[i]``; a negative slot is skipped.

    ``key`` and ``value`` (N, KV heads, head_dim); ``kv_cache`` (2, blocks, block_size, KV heads, head_dim), of any
    float dtype, or quantised with its ``kv_scales`` (kv_quant.py); ``slot_mapping`` (N,) int64, without repeated slots.
    """
    kept = tokens_to_store(slot_mapping)
    if kept is None:
        scatter_kv(key, value, kv_cache, slot_mapping, kv_scales)
    else:
        scatter_kv(key[kept], value[kept], kv_cache, slot_mapping[kept], kv_scales)


def tokens_to_store(slot_mapping: torch.Tensor) -> torch.Tensor | None:
    """Indices of the tokens that are no padding, or None where all are to be stored.  Waits for the device."""
    stored = slot_mapping >= 0
    return None if bool(stored.all()) else stored.nonzero().squeeze(1)


def scatter_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """``store_kv`` for slots (N,) int64 of which none is padding."""
    width = key.shape[1] * key.shape[2]
    for part, states in enumerate((key, value)):
        cache = kv_cache[part]
        if kv_scales is None:
            cache.view(-1, width).index_copy_(0, slots, states.reshape(-1, width).to(cache.dtype))
            continue
        values, scales = quantise(states, cache.dtype)
        # As bytes, because index_copy_ knows no 8-bit floats.
        cache.view(torch.uint8).view(-1, width).index_copy_(0, slots, values.view(torch.uint8).view(-1, width))
        block_size = cache.shape[1]
        kv_scales[part][slots // block_size, :, slots % block_size] = scales
