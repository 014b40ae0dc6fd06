"""Attention of one request's last tokens to its keys, in plain PyTorch: in tiles of queries, each over the keys that it
can see.

Grouped-query attention never copies keys: the queries that share a KV head are a batch axis over which the keys are
repeated as a view.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.kernels.attention import plain_attention
from tp_engine.kernels.kv_cache.block_codes import BlockForm
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, dequantise, states_at

# A tile does not read keys after its end, and its mask stays small.
TILE = 256


def attend_last(query: torch.Tensor, new: KeyValue, shape: AttentionShape, *, sees_later: bool = False) -> torch.Tensor:
    """Queries (t, heads, head_dim), the last positions of keys and values (n, KV heads, ...) -> (t, heads, size of a
    value).  Keys after a query's own position are hidden unless it ``sees_later`` ones."""
    num_keys, window = len(new.key), shape.sliding_window
    out, ahead = query.new_empty(*query.shape[:2], new.value.shape[-1]), num_keys - len(query)
    is_plain, sinks = shape.softcap is None and shape.sinks is None, sinks_by_kv_head(shape)
    for start in range(0, len(query), TILE):
        own = query[start : start + TILE]
        first = 0 if window is None else max(0, ahead + start - window + 1)
        seen = slice(first, num_keys if sees_later else ahead + start + len(own))
        keys, values = (
            states[seen].transpose(0, 1).expand(shape.num_heads // shape.num_kv_heads, -1, -1, -1) for states in new
        )
        sees_all = window is None or ahead + start + len(own) - first <= window
        is_causal = is_plain and sees_all and not sees_later and len(own) == keys.shape[2]
        mask = None
        if not is_causal and not (sees_later and sees_all):
            places = torch.arange(seen.start, seen.stop, device=query.device, dtype=torch.int64)
            positions = torch.arange(ahead + start, ahead + start + len(own), device=query.device, dtype=torch.int64)
            mask = hidden_keys(places, positions[:, None], None if sees_all else window, query.dtype, sees_later)
        attended = attend(
            own.unflatten(1, (shape.num_kv_heads, -1)).permute(2, 1, 0, 3),
            keys,
            values,
            mask,
            shape=shape,
            sinks=None if sinks is None else sinks.T[..., None, None],
            is_causal=is_causal,
        )
        out[start : start + TILE] = attended.permute(2, 1, 0, 3).flatten(1, 2)
    return out


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    shape: AttentionShape,
    sinks: torch.Tensor | None,
    is_causal: bool = False,
) -> torch.Tensor:
    """``query`` (..., q, head_dim) over ``keys`` and ``values`` (..., k, size of each) -> (..., q, size of a value).

    ``mask`` (..., q, k) is 0, or -inf where a key is hidden; ``is_causal`` replaces a causal mask if the layer has no
    softcap and no sinks.  ``sinks`` (..., q or 1, 1) are the shape's sinks for the rows of ``query``.
    """
    if shape.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, scale=shape.scale)
    assert not is_causal
    return plain_attention.attend(query, keys, values, mask, scale=shape.scale, softcap=shape.softcap, sinks=sinks)


def sinks_by_kv_head(shape: AttentionShape) -> torch.Tensor | None:
    """The layer's sinks as (KV heads, queries per KV head), if it has any."""
    return None if shape.sinks is None else shape.sinks.view(shape.num_kv_heads, -1)


def hidden_keys(
    places: torch.Tensor, positions: torch.Tensor, window: int | None, dtype: torch.dtype, sees_later: bool = False
) -> torch.Tensor:
    """The mask (..., queries, keys) of keys at ``places`` (..., keys), for queries at ``positions`` (..., queries, 1):
    0, or -inf where a key comes after its query, unless that ``sees_later`` ones, or before its ``window``."""
    hidden = torch.zeros_like(places > positions) if sees_later else places > positions
    if window is not None:
        hidden |= places <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots (..., n) int64 of ``positions`` (..., n) int64 of requests with ``block_table`` (..., M)."""
    return block_table.gather(-1, positions // block_size).long() * block_size + positions % block_size


def cached_states(kv: LayerKv, slots: torch.Tensor, shape: AttentionShape, dtype: torch.dtype) -> KeyValue:
    """Keys (n, KV heads, head_dim) and values (n, KV heads, size of a value) at ``slots`` (n,) int64."""
    key = states_at(kv, 0, slots).to(dtype)
    is_part = shape.value_dim is not None
    return KeyValue(key, key[..., : shape.value_dim] if is_part else states_at(kv, 1, slots).to(dtype))


class ImageSpan(NamedTuple):
    """An image whose tokens see all of it: ``length`` of the step's tokens from ``start`` on, the last of ``end``
    tokens of request ``request`` of the step's batch."""

    request: int
    start: int
    length: int
    end: int


def attend_to_images(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: LayerKv,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    images: Iterable[ImageSpan],
    simd_width: int = 0,
) -> None:
    """Overwrite ``out`` (N, heads, head_dim) for the tokens of ``images``, which a backend has treated as text.

    A chunk never cuts such an image, so its keys are all in the cache.  ``simd_width``: of the backend that keeps
    ``kv`` (``registry.simd_width``).
    """
    block_size, window = kv.cache.shape[2], shape.sliding_window
    for image in images:
        own = slice(image.start, image.start + image.length)
        first = 0 if window is None else max(0, image.end - image.length - window + 1)
        table = metadata.block_table[image.request]
        if simd_width:
            blocks = table[first // block_size : -(-image.end // block_size)]
            begin = first // block_size * block_size
            states = KeyValue(*(one[first - begin : image.end - begin] for one in _states_in(kv, blocks, simd_width)))
        else:
            slots = slots_of(table, torch.arange(first, image.end, device=query.device, dtype=torch.int64), block_size)
            states = cached_states(kv, slots, shape, query.dtype)
        out[own] = attend_last(query[own], KeyValue(*(one.to(query.dtype) for one in states)), shape, sees_later=True)


def _states_in(kv: LayerKv, block_ids: torch.Tensor, simd_width: int) -> KeyValue:
    """Keys and values (tokens of the blocks, KV heads, head_dim), of a cache in the order of the C kernels."""
    _, _, block_size, num_heads, head_dim = kv.cache.shape
    form = BlockForm(
        num_parts=2, block_size=block_size, num_kv_heads=num_heads, head_dim=head_dim, dtype=kv.cache.dtype,
        simd_width=simd_width,
    )  # fmt: skip
    ids = block_ids.long()
    # As bytes, because 8-bit floats cannot be indexed.
    blocks = kv.cache.view(torch.uint8).transpose(0, 1)[ids]
    states = form.vectors_of(blocks.flatten(1)).unflatten(2, (num_heads, block_size)).permute(1, 0, 3, 2, 4)
    if kv.scales is not None:
        states = dequantise(states, kv.scales[:, ids].transpose(2, 3))
    return KeyValue(*states.flatten(1, 2))
