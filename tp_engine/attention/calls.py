"""The two kinds of attention call in a step: many requests with a short query, or one request with a long query.

Grouped-query attention never copies keys: the queries that share a KV head either become more query positions
(``GroupCall``) or a batch axis over which the keys are repeated as a view (``ChunkCall``).

Masks are added to the scores: 0 where a key is visible, -inf where it is not.  Key position j is visible to query
position i iff ``j <= i``, and ``i - window < j`` if there is a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionShape
from tp_engine.attention.gathering import RowReader
from tp_engine.kernels.attention import plain_attention
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.plan import IntArray

_HIDDEN = float("-inf")

# Queries of a long chunk in one call: it does not read keys after the tile's end, and its mask stays small.
TILE = 256
# Which of the step's tokens: a range, or their indices (tokens,) int64.
TokenSelection: TypeAlias = slice | torch.Tensor


@dataclass(slots=True)
class LayerInput:
    """One layer's ``query`` (N, heads, head_dim), the step's own keys and values, if at hand, and its cache."""

    query: torch.Tensor
    new: KeyValue | None
    kv: LayerKv
    shape: AttentionShape
    reader: RowReader

    def cached(self, rows: torch.Tensor, dtype: torch.dtype) -> KeyValue:
        """Keys (keys, KV heads, head_dim) of the cache, and values (keys, KV heads, value_dim)."""
        keys = self.reader.read(self.kv, 0, rows).to(dtype)
        if self.shape.value_dim is not None:
            return KeyValue(keys, keys[..., : self.shape.value_dim])
        return KeyValue(keys, self.reader.read(self.kv, 1, rows).to(dtype))


class AttentionCall(Protocol):
    """One piece of a step's attention, equal in all layers that share a window."""

    @property
    def tokens(self) -> TokenSelection:
        """The tokens of its queries."""

    def run(self, layer: LayerInput, dtype: torch.dtype) -> torch.Tensor:
        """Output (tokens, heads, head_dim), computed in ``dtype``."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """B requests of ``query_len`` queries each, padded to the same number of keys.

    ``mask`` (B, 1, query_len x group, keys); (B, 1, 1, keys) if ``query_len`` is 1.
    """

    tokens: TokenSelection
    rows: torch.Tensor
    mask: torch.Tensor | None
    num_requests: int
    query_len: int

    def run(self, layer: LayerInput, dtype: torch.dtype) -> torch.Tensor:
        """Fold the query group into the query positions: (B, KV heads, query_len x group, head_dim)."""
        shape, batch, length = layer.shape, self.num_requests, self.query_len
        kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        group = shape.num_heads // kv_heads
        query = layer.query
        query = query[self.tokens] if isinstance(self.tokens, slice) else query.index_select(0, self.tokens)
        query = query.to(dtype).view(batch, length, kv_heads, group, head_dim).transpose(1, 2)
        keys, values = (
            states.view(batch, -1, kv_heads, states.shape[2]).transpose(1, 2)
            for states in layer.cached(self.rows, dtype)
        )
        sinks = sinks_by_kv_head(shape)
        out = attend(
            query.reshape(batch, kv_heads, length * group, head_dim),
            keys,
            values,
            self.mask,
            shape=shape,
            sinks=None if sinks is None else sinks.repeat(1, length).unsqueeze(-1),
        )
        out = out.reshape(batch, kv_heads, length, group, -1).transpose(1, 2)
        return out.reshape(batch * length, shape.num_heads, -1)


@dataclass(frozen=True, slots=True)
class ChunkCall:
    """One request of many queries: its keys are positions ``first_key`` to ``seq_len``, at ``rows`` of the cache.

    Without ``rows`` it is a fresh prompt, whose keys are this step's own: the cache is not read.
    """

    tokens: slice
    rows: torch.Tensor | None
    first_key: int
    seq_len: int
    masks: StaircaseMasks

    def run(self, layer: LayerInput, dtype: torch.dtype) -> torch.Tensor:
        """Attend to what ``layer`` has from ``first_key`` on."""
        query = layer.query[self.tokens].to(dtype)
        return attend_last(query, self._read(layer, dtype), layer.shape, self.masks, self.seq_len, self.first_key)

    def _read(self, layer: LayerInput, dtype: torch.dtype) -> KeyValue:
        """Keys and values (keys, KV heads, head_dim) from ``first_key`` on."""
        if self.rows is None:
            assert layer.new is not None
            return KeyValue(*(states[self.tokens].to(dtype) for states in layer.new))
        return layer.cached(self.rows, dtype)


def attend_last(
    query: torch.Tensor,
    new: KeyValue,
    shape: AttentionShape,
    masks: StaircaseMasks,
    seq_len: int | None = None,
    first_key: int = 0,
) -> torch.Tensor:
    """Queries (t, heads, head_dim), the last of ``seq_len`` positions, over those keys and values (n, KV heads, ...)
    that begin with position ``first_key``; in tiles of queries, each over the keys that it can see.

    Without ``seq_len`` there are n positions.  Returns (t, heads, size of a value).
    """
    keys, values = new
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    cached = (len(keys) if seq_len is None else seq_len) - len(query)
    for start in range(0, len(query), TILE):
        end = min(start + TILE, len(query))
        first = 0 if shape.sliding_window is None else max(0, cached + start - shape.sliding_window + 1)
        seen = slice(first - first_key, cached + end - first_key)
        out[start:end] = _attend_tile(query[start:end], keys[seen], values[seen], shape, masks)
    return out


def _attend_tile(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: AttentionShape, masks: StaircaseMasks
) -> torch.Tensor:
    """Queries (t, heads, head_dim) that are the last positions of their ``keys`` (n, KV heads, head_dim)."""
    num_queries, num_keys, window = len(query), len(keys), shape.sliding_window
    group = shape.num_heads // shape.num_kv_heads
    grouped = query.reshape(num_queries, shape.num_kv_heads, group, -1).permute(2, 1, 0, 3)
    keys, values = (states.transpose(0, 1).expand(group, -1, -1, -1) for states in (keys, values))
    is_plain = shape.softcap is None and shape.sinks is None
    is_causal = is_plain and num_queries == num_keys and (window is None or num_queries <= window)
    mask = None
    if not is_causal:
        mask = masks.corner(num_queries, num_keys, window, query.dtype, query.device)
        if query.device.type != "cpu":
            mask = mask.contiguous()  # device kernels want aligned rows
    sinks = sinks_by_kv_head(shape)
    out = attend(
        grouped,
        keys,
        values,
        mask,
        is_causal=is_causal,
        shape=shape,
        sinks=None if sinks is None else sinks.T[..., None, None],
    )
    return out.permute(2, 1, 0, 3).flatten(1, 2)


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
    """Return the layer's sinks as (KV heads, queries per KV head), if it has any."""
    return None if shape.sinks is None else shape.sinks.view(shape.num_kv_heads, -1)


def batched_mask(
    own_key: IntArray, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Mask (B, queries, num_keys).  ``own_key`` (B, queries): the index of the key at a query's own position."""
    last = torch.from_numpy(own_key).to(device)[:, :, None]
    key = torch.arange(num_keys, dtype=torch.int32, device=device)
    visible = key <= last
    if window is not None:
        visible &= key > last - window
    return torch.where(visible, torch.zeros((), dtype=dtype, device=device), _HIDDEN)


class StaircaseMasks:
    """Masks of queries that are the last positions of their keys, all cut from one table per window and dtype.

    Such a mask depends on ``j - i`` alone, so the mask of t queries over n keys is the table's lower right corner::

                 n keys
        . . . . 0 0 0 -        . visible in the table, outside this corner
        . . . . 0 0 0 0  t     0 visible   - hidden
    """

    def __init__(self, max_queries: int) -> None:
        self._max_queries = max_queries
        self._tables: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}

    def corner(
        self, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Mask (num_queries, num_keys), for at most ``max_queries`` queries and at least as many keys as queries."""
        table = self._tables.get((window, dtype, device))
        if table is None or table.shape[1] < num_keys:
            table = self._build(max(num_keys, self._max_queries), window, dtype, device)
            self._tables[window, dtype, device] = table
        return table[self._max_queries - num_queries :, table.shape[1] - num_keys :]

    def _build(self, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The table for up to twice ``num_keys`` keys, so that a growing context seldom needs a new one."""
        capacity = 2 * num_keys
        own_key = np.arange(capacity - self._max_queries, capacity, dtype=np.int32)
        return batched_mask(own_key[np.newaxis], capacity, window, dtype, device)[0]
