"""The attention layer, and the step's metadata that it reads.

The layer holds its shape and its part of the KV cache; a backend does the work.  The metadata is ambient: a model's
forward pass runs inside of ``forward_context``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.attention.registry import simd_width
from tp_engine.attention.tiles import attend_to_images
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.layers.context import Layer
from tp_engine.layers.image_rows import images_of_step

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


def only(wanted: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Those of ``tokens`` (N, ...) that are ``wanted`` (n,) int64; all of them if it is None."""
    return tokens if wanted is None else tokens.index_select(0, wanted)


class HasIndexKeys(Protocol):
    """An indexer, as far as the cache is concerned."""

    index_kv: LayerKv | None


class Attention(Layer):
    """Causal attention of one layer over this rank's heads; its blocks are in the tables of KV group ``group``.

    ``kv`` is None until ``bind_kv_cache``.  With a ``source`` the layer reads that layer's keys and values, and keeps
    none.  An ``indexer`` keeps index keys in the same blocks.
    """

    def __init__(
        self,
        shape: AttentionShape,
        backend: AttentionBackend,
        group: int = 0,
        source: Attention | None = None,
        indexer: HasIndexKeys | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        self._kv: LayerKv | None = None
        self._indexer = indexer
        self._backend = backend
        self._sources: tuple[Attention, ...] = ()  # in a tuple, or it would be a part of this module
        if source is not None:
            self.read(source)

    def read(self, source: Attention) -> None:
        """Read the keys and values of ``source`` from now on."""
        self._sources = (source,)

    @property
    def has_own_kv(self) -> bool:
        """Whether the layer keeps keys and values."""
        return not self._sources

    @property
    def kv(self) -> LayerKv | None:
        """The layer's part of the cache, or that of its source."""
        return self._sources[0].kv if self._sources else self._kv

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None = None) -> None:
        """Use this layer's slice (parts, blocks, block_size, local KV heads, head_dim) from now on.

        ``kv_scales`` (parts, blocks, local KV heads, block_size) float32 belong to a quantised cache.
        """
        assert kv_cache.shape[-2:] == (self.shape.num_kv_heads, self.shape.head_dim), (kv_cache.shape, self.shape)
        self._kv = LayerKv(kv_cache, kv_scales)

    def unbind_kv_cache(self) -> None:
        """Drop the cache: the layer is as before ``bind_kv_cache``."""
        self._kv = None
        if self._indexer is not None:
            self._indexer.index_kv = None

    def bind_index_keys(self, keys: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Use this layer's slice of the index keys (1, blocks, block_size, 1, dim) from now on, and their scales."""
        assert self._indexer is not None, "the layer has no indexer"
        self._indexer.index_kv = LayerKv(keys, scales)

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        """``query`` (N, heads, head_dim), ``key``, ``value`` (N, KV heads, head_dim) -> (N, heads, head_dim).

        With ``AttentionShape.latent``, query heads have its query_dim, and output heads its value_dim.
        The inputs may be strided views whose last dimension is contiguous.  If ``key`` and ``value`` are None,
        the caller has stored them already.
        """
        metadata, kv = current_metadata(self.group), self.kv
        assert kv is not None, "there is no cache yet"
        new = None if key is None or value is None else KeyValue(key, value)
        out = self._backend.forward(query, new, kv, metadata, self.shape)
        if self.shape.sees_whole_images and (images := images_of_step()) is not None:
            width = simd_width(self._backend, kv.cache.shape[2])
            attend_to_images(out, query, kv, metadata, self.shape, images.spans, width)
        return out
