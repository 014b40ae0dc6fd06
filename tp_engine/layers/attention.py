"""The attention layer: it knows its shape and its part of the KV cache; a backend does the work."""

from __future__ import annotations

import torch

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape, KeyValue
from tp_engine.kernels.layer_kv import LayerKv
from tp_engine.kernels.paged_attention import attend
from tp_engine.layers.context import Layer
from tp_engine.layers.forward_context import current_metadata


class Attention(Layer):
    """Causal attention of one layer over this rank's heads; its blocks are in the tables of KV group ``group``.

    ``kv`` is None until ``bind_kv_cache``: memory is profiled before there is a cache, on new requests whose keys and
    values are all in the step itself.
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
        """There is no cache again, as before ``bind_kv_cache``."""
        self.kv = None

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        """``query`` (N, heads, head_dim), ``key``, ``value`` (N, KV heads, head_dim) -> (N, heads, head_dim).

        The inputs may be strided views whose last dimension is contiguous.  Without ``key`` and ``value`` the caller
        has stored them already.
        """
        metadata = current_metadata(self.group)
        new = None if key is None or value is None else KeyValue(key, value)
        if self.kv is None:
            assert new is not None, "there is no cache yet that could hold them"
            return attend_fresh(query, new, metadata, self.shape)
        return self._backend.forward(query, new, self.kv, metadata, self.shape)
