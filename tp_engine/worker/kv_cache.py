"""The KV cache of one rank: blocks, each one contiguous piece with all layers of a group.

::

    raw     (blocks, block_bytes) uint8         | block 0                             | block 1 ...
                                                | K0 V0 K1 V1 ... | scales, if quantised |
    cache   (blocks, layers per block, 2, block_size, local KV heads, head_dim)           0: keys, 1: values
    scales  (blocks, layers per block, 2, local KV heads, block_size) float32             kernels/layer_kv.py
    a layer's view is (2, blocks, block_size, local KV heads, head_dim): of the layer with place i in its group

A block belongs to one group of layers at a time (kv_layout.py), so the layers at one place share a view, not a block.
The attention backend decides the order inside of a block; on CPUs it is another.  Whatever moves blocks moves ``raw``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tp_engine.errors import MemoryBudgetError
from tp_engine.kernels.huge_pages import map_zeros
from tp_engine.kernels.layer_kv import SCALE_DTYPE, is_quantised, layer_view
from tp_engine.kv_layout import KvLayout, kv_block_bytes, kv_scale_bytes
from tp_engine.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheShape:
    """All of the cache's dimensions but the number of blocks."""

    layers_per_block: int
    block_size: int
    local_num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return kv_block_bytes(
            num_layers=self.layers_per_block,
            block_size=self.block_size,
            local_num_kv_heads=self.local_num_kv_heads,
            head_dim=self.head_dim,
            itemsize=self.dtype.itemsize,
            scale_bytes=self._scale_bytes,
        )

    @property
    def _scale_bytes(self) -> int:
        if not is_quantised(self.dtype):
            return 0
        return kv_scale_bytes(
            num_layers=self.layers_per_block,
            block_size=self.block_size,
            local_num_kv_heads=self.local_num_kv_heads,
        )

    def views_of(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache and scales of ``raw`` (n, block_bytes), contiguous, as in the module's text.

        Their strides do not depend on n, so kernels that are compiled for one block suit any number.
        """
        pieces, end = (self.layers_per_block, 2), self.block_bytes - self._scale_bytes
        cache = _views(raw, self.dtype, 0, (*pieces, self.block_size, self.local_num_kv_heads, self.head_dim))
        if not self._scale_bytes:
            return cache, None
        return cache, _views(raw, SCALE_DTYPE, end, (*pieces, self.local_num_kv_heads, self.block_size))


def _views(raw: torch.Tensor, dtype: torch.dtype, begin: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """(n, *sizes) of ``dtype``: the part of each row of ``raw`` (n, bytes) that begins at byte ``begin``."""
    strides = (raw.shape[1] // dtype.itemsize, *(math.prod(sizes[i + 1 :]) for i in range(len(sizes))))
    return raw.flatten().view(dtype).as_strided((len(raw), *sizes), strides, begin // dtype.itemsize)


class KvCacheLayer(Protocol):
    """An attention layer, as far as its cache is concerned."""

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
        """Take (2, blocks, block_size, local KV heads, head_dim), and (2, blocks, local KV heads, block_size)."""


@dataclass(frozen=True, slots=True, eq=False)
class KvBlocks:
    """``num_blocks`` zeroed blocks; see the module's text for the three tensors, which share memory."""

    raw: torch.Tensor
    cache: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def allocate(cls, shape: KvCacheShape, num_blocks: int, device: torch.device) -> KvBlocks:
        """Blocks on ``device``; raises ``MemoryBudgetError`` if there is no memory for them.

        On CPU they are mapped, not written: the kernel provides a zeroed page when a block is first used.
        """
        num_bytes = num_blocks * shape.block_bytes
        try:
            if device.type == "cpu":
                raw = map_zeros(num_bytes)
            else:
                raw = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise MemoryBudgetError(
                f"can not allocate {format_gib(num_bytes)} for {num_blocks} KV blocks on {device} ({error}); lower "
                f"gpu_memory_utilization, num_gpu_blocks_override or kv_cache_memory_bytes"
            ) from error
        raw = raw.view(num_blocks, shape.block_bytes)
        return cls(raw, *shape.views_of(raw))

    def bind(self, layers: Sequence[KvCacheLayer], layout: KvLayout) -> None:
        """Give each layer the view of its place; there must be as many layers as ``layout`` has."""
        num_layers = sum(len(group.layers) for group in layout.groups)
        assert len(layers) == num_layers, f"{len(layers)} attention layers for a cache of {num_layers}"
        assert self.cache.shape[1] == layout.layers_per_block, (self.cache.shape, layout)
        for index, layer in enumerate(layers):
            _, place = layout.place_of(index)
            scales = None if self.scales is None else layer_view(self.scales, place)
            layer.bind_kv_cache(layer_view(self.cache, place), scales)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks, from ids ``source`` (n,) int64 to ``target`` (n,); all are read before any is written."""
        self.raw[target] = self.raw[source]


def resident_bytes(raw: torch.Tensor) -> int:
    """Bytes of ``raw``, a contiguous tensor on the CPU, that occupy memory because they have been used."""
    num_bytes = raw.numel() * raw.itemsize
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    in_core = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(raw.data_ptr()), ctypes.c_size_t(num_bytes), in_core) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int(torch.frombuffer(in_core, dtype=torch.uint8).bitwise_and_(1).sum()) * mmap.PAGESIZE
