"""Attention without a cache: what profiling runs, before there are blocks, and tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.calls import TILE, StaircaseMasks, attend_last
from tp_engine.attention.latent import attend_expanded
from tp_engine.kernels.kv_cache.layer_kv import KeyValue


def attend_fresh(
    query: torch.Tensor, new: KeyValue, metadata: AttentionMetadata, shape: AttentionShape
) -> torch.Tensor:
    """Causal attention of each request over this step's keys alone, request by request."""
    size = query.shape[2] if shape.latent is None else shape.latent.value_dim
    output, start, masks = query.new_zeros(*query.shape[:2], size), 0, StaircaseMasks(TILE)
    for length in metadata.host_query_lens.tolist():
        rows = slice(start, start + length)
        own, states = query[rows], KeyValue(new.key[rows], new.value[rows])
        if shape.latent is not None:
            output[rows] = attend_expanded(own, states.key, shape, masks)
        elif _is_plain(shape, length):
            output[rows] = attend_causally(own, states, shape.scale)
        else:
            output[rows] = attend_last(own, states, shape, masks)
        start += length
    return output


def _is_plain(shape: AttentionShape, length: int) -> bool:
    """Whether each of ``length`` queries sees all keys before it, by the usual softmax."""
    return shape.softcap is None and shape.sinks is None and length <= (shape.sliding_window or length)


def attend_causally(query: torch.Tensor, new: KeyValue, scale: float) -> torch.Tensor:
    """One request: queries (n, heads, head_dim) over as many keys, each over those before it, by PyTorch's function."""
    q, k, v = (states.transpose(0, 1).unsqueeze(0) for states in (query, *new))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return attended.squeeze(0).transpose(0, 1)
