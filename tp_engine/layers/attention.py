"""The attention layer: it knows its shape and its part of the KV cache; a backend does the work."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.layers.forward_context import current_metadata


class Attention(nn.Module):
    """Causal attention of one layer over this rank's heads.

    ``group`` is the layer's in the model's ``kv_layout``, ``backend`` that group's own: a backend keeps a group's step.
    ``kv_cache`` (and ``kv_scales``, if it is quantised) is None until ``bind_kv_cache``: memory is profiled before
    there is a cache, on new requests whose keys and values are all in the step itself.
    """

    def __init__(self, shape: AttentionShape, backend: AttentionBackend, group: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.group = group
        self.kv_cache: torch.Tensor | None = None
        self.kv_scales: torch.Tensor | None = None
        self._backend = backend

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None = None) -> None:
        """Use this layer's slice (2, blocks, block_size, local KV heads, head_dim) from now on.

        ``kv_scales`` (2, blocks, local KV heads, block_size) float32 belong to a quantised cache.
        """
        assert kv_cache.shape[-2:] == (self.shape.num_kv_heads, self.shape.head_dim), (kv_cache.shape, self.shape)
        self.kv_cache, self.kv_scales = kv_cache, kv_scales

    def unbind_kv_cache(self) -> None:
        """There is no cache again, as before ``bind_kv_cache``."""
        self.kv_cache = self.kv_scales = None

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        """``query`` (N, heads, head_dim), ``key``, ``value`` (N, KV heads, head_dim) -> (N, heads, head_dim).

        The inputs may be strided views whose last dimension is contiguous.  Without ``key`` and ``value`` the caller
        has stored them already.
        """
        metadata = current_metadata(self.group)
        if self.kv_cache is None:
            assert key is not None and value is not None, "there is no cache yet that could hold them"
            return attend_fresh(query, key, value, metadata, self.shape)
        return self._backend.forward(query, key, value, self.kv_cache, metadata, self.shape, self.kv_scales)


def attend_fresh(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata, shape: AttentionShape
) -> torch.Tensor:
    """Causal attention of each request over this step's keys alone, request by request; for profiling and tests."""
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    start = 0
    for length in metadata.host_query_lens.tolist():
        rows = slice(start, start + length)
        q, k, v = (tensor[rows].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        mask = _window_mask(length, shape.sliding_window, query.device)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=True
        )
        output[rows] = attended.squeeze(0).transpose(0, 1)
        start += length
    return output


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(length, length), True where a key is visible; None where no key is out of the window."""
    if window is None or length <= window:
        return None
    positions = torch.arange(length, device=device)
    distance = positions.unsqueeze(1) - positions
    return (distance >= 0) & (distance < window)
