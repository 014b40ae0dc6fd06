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
from tp_engine.kernels import plain_attention
from tp_engine.kernels.layer_kv import KeyValue, LayerKv
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

    def cached(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Keys (part 0) or values (part 1) of the cache: (keys, KV heads, head_dim)."""
        return self.reader.read(self.kv, part, rows)


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
            layer.cached(part, self.rows).to(dtype).view(batch, -1, kv_heads, head_dim).transpose(1, 2)
            for part in (0, 1)
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
        out = out.view(batch, kv_heads, length, group, head_dim).transpose(1, 2)
        return out.reshape(batch * length, shape.num_heads, head_dim)


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
        """Attend in tiles of queries, each over the keys that it can see."""
        query = layer.query[self.tokens].to(dtype)
        keys, values = (states.to(dtype) for states in self._read(layer))
        out = torch.empty_like(query)
        cached = self.seq_len - len(query)
        for start in range(0, len(query), TILE):
            end = min(start + TILE, len(query))
            first = 0 if layer.shape.sliding_window is None else max(0, cached + start - layer.shape.sliding_window + 1)
            seen = slice(first - self.first_key, cached + end - self.first_key)
            out[start:end] = self._tile(query[start:end], keys[seen], values[seen], layer.shape)
        return out

    def _read(self, layer: LayerInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (keys, KV heads, head_dim) from ``first_key`` on."""
        if self.rows is None:
            assert layer.new is not None
            return layer.new.key[self.tokens], layer.new.value[self.tokens]
        return layer.cached(0, self.rows), layer.cached(1, self.rows)

    def _tile(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Queries (t, heads, head_dim) that are the last positions of their ``keys`` (n, KV heads, head_dim)."""
        num_queries, num_keys, window = len(query), len(keys), shape.sliding_window
        group = shape.num_heads // shape.num_kv_heads
        grouped = query.view(num_queries, shape.num_kv_heads, group, shape.head_dim).permute(2, 1, 0, 3)
        keys, values = (states.transpose(0, 1).expand(group, -1, -1, -1) for states in (keys, values))
        is_plain = shape.softcap is None and shape.sinks is None
        is_causal = is_plain and num_queries == num_keys and (window is None or num_queries <= window)
        mask = None
        if not is_causal:
            mask = self.masks.corner(num_queries, num_keys, window, query.dtype, query.device)
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
        return out.permute(2, 1, 0, 3).reshape(query.shape)


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
    """``query`` (..., q, head_dim) over ``keys`` and ``values`` (..., k, head_dim) -> (..., q, head_dim).

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
