"""The attention layer, and the step's metadata that it reads.

The layer holds its shape and its part of the KV cache; a backend does the work.  The metadata is the only ambient state
of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.attention.calls import TILE, attend, sinks_by_kv_head
from tp_engine.kernels.layer_kv import KeyValue, LayerKv
from tp_engine.layers.context import Layer

_metadata: ContextVar[Sequence[AttentionMetadata]] = ContextVar("attention_metadata")


@contextmanager
def forward_context(metadata: Sequence[AttentionMetadata]) -> Iterator[None]:
    """Run a model's forward pass inside of this block.

    ``metadata`` has one entry per group of layers (``kv_layout``).
    """
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


def current_metadata(group: int = 0) -> AttentionMetadata:
    """This step's metadata for a group of layers; asserts that ``forward_context`` is active."""
    metadata = _metadata.get(None)
    assert metadata is not None, "the model was called outside of forward_context"
    return metadata[group]


class Attention(Layer):
    """Causal attention of one layer over this rank's heads; its blocks are in the tables of KV group ``group``.

    ``kv`` is None until ``bind_kv_cache``: memory is measured before there is a cache, with new requests whose keys and
    values are all in the step.
    """

    def __init__(self, shape: AttentionShape, backend: AttentionBackend, group: int = 0) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        self.kv: LayerKv | None = None
        self._backend = backend

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None = None) -> None:
        """Use this layer's slice (2, blocks, block_size, local KV heads, head_dim) from now on.

        ``kv_scales`` (2, blocks, local KV heads, block_size) float32 belong to a quantised cache.
        """
        assert kv_cache.shape[-2:] == (self.shape.num_kv_heads, self.shape.head_dim), (kv_cache.shape, self.shape)
        self.kv = LayerKv(kv_cache, kv_scales)

    def unbind_kv_cache(self) -> None:
        """Drop the cache: the layer is as before ``bind_kv_cache``."""
        self.kv = None

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        """``query`` (N, heads, head_dim), ``key``, ``value`` (N, KV heads, head_dim) -> (N, heads, head_dim).

        The inputs may be strided views whose last dimension is contiguous.  If ``key`` and ``value`` are None,
        the caller has stored them already.
        """
        metadata = current_metadata(self.group)
        new = None if key is None or value is None else KeyValue(key, value)
        if self.kv is None:
            assert new is not None, "keys and values are needed: there is no cache yet"
            return attend_fresh(query, new, metadata, self.shape)
        return self._backend.forward(query, new, self.kv, metadata, self.shape)


def attend_fresh(
    query: torch.Tensor, new: KeyValue, metadata: AttentionMetadata, shape: AttentionShape
) -> torch.Tensor:
    """Causal attention of each request over this step's keys alone, request by request; for profiling and tests."""
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    is_plain = shape.softcap is None and shape.sinks is None
    start = 0
    for length in metadata.host_query_lens.tolist():
        rows = slice(start, start + length)
        attend_one = _attend_plainly if is_plain else _attend_by_tiles
        output[rows] = attend_one(query[rows], new.key[rows], new.value[rows], shape)
        start += length
    return output


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
