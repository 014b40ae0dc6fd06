"""Write new keys and values into the paged cache: plain PyTorch, the twin of the Triton kernels that store."""

from __future__ import annotations

import torch

from tp_engine.kernels.kv_quant import quantise
from tp_engine.kernels.layer_kv import KeyValue, LayerKv


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
    """Indices of the tokens that are no padding, or None where all are to be stored.  Waits for the device."""
    stored = slot_mapping >= 0
    return None if bool(stored.all()) else stored.nonzero().squeeze(1)


def scatter_kv(new: KeyValue, kv: LayerKv, slots: torch.Tensor) -> None:
    """``store_kv`` for slots (N,) int64 of which none is padding."""
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
