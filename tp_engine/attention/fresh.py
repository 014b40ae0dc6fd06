"""Attention before there is a cache: new requests whose keys are all in the step; for profiling and tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.calls import TILE, StaircaseMasks, attend, sinks_by_kv_head
from tp_engine.attention.latent import attend_expanded
from tp_engine.kernels.layer_kv import KeyValue


def attend_fresh(
    query: torch.Tensor, new: KeyValue, metadata: AttentionMetadata, shape: AttentionShape
) -> torch.Tensor:
    """Causal attention of each request over this step's keys alone, request by request."""
    size = query.shape[2] if shape.latent is None else shape.latent.value_dim
    output, start = query.new_zeros(*query.shape[:2], size), 0
    attend_one = _attend_one_of(shape)
    for length in metadata.host_query_lens.tolist():
        rows = slice(start, start + length)
        output[rows] = attend_one(query[rows], new.key[rows], new.value[rows], shape)
        start += length
    return output


def _attend_one_of(shape: AttentionShape) -> Callable[..., torch.Tensor]:
    """What attends for one request."""
    if shape.latent is not None:
        return lambda query, rows, _, shape: attend_expanded(query, rows, shape, StaircaseMasks(TILE))
    return _attend_plainly if shape.softcap is None and shape.sinks is None else _attend_by_tiles


def _attend_plainly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """One request, with PyTorch's function."""
    q, k, v = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    length, window = len(query), shape.sliding_window
    mask = None if window is None or length <= window else _visible(0, length, window, query.device)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=True
    )
    return attended.squeeze(0).transpose(0, 1)


def _attend_by_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """One request with a softcap or sinks, in tiles of queries: the scores of all would take much memory."""
    grouped = query.reshape(len(query), shape.num_kv_heads, -1, shape.head_dim).permute(2, 1, 0, 3)
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    sinks, out = sinks_by_kv_head(shape), torch.empty_like(query)
    for start in range(0, len(query), TILE):
        end = min(start + TILE, len(query))
        mask = torch.where(_visible(start, end, shape.sliding_window, query.device), 0.0, float("-inf"))
        attended = attend(
            grouped[:, :, start:end],
            keys[:, :end],
            values[:, :end],
            mask,
            shape=shape,
            sinks=None if sinks is None else sinks.T[..., None, None],
        )
        out[start:end] = attended.permute(2, 1, 0, 3).flatten(1, 2)
    return out


def _visible(start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(end - start, end): True where the query at a position from ``start`` to ``end`` sees the key."""
    distance = torch.arange(start, end, device=device).unsqueeze(1) - torch.arange(end, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
