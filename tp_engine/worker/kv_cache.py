"""The KV cache tensor of one rank, and the scales beside it if it is quantised.

::

    kv_cache  (2, layers per block, blocks, block_size, local KV heads, head_dim)       0: keys, 1: values
    kv_scales (2, layers per block, blocks, local KV heads, block_size) float32         kernels/layer_kv.py
    kv_cache[:, i] is (2, blocks, block_size, local KV heads, head_dim), a view: of the layer with place i in its group

A block belongs to one group of layers at a time (kv_layout.py), so the layers at one place share a view, not a block.
The attention backend decides the order inside of a block; on CPUs it is another.
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
from tp_engine.kernels.layer_kv import SCALE_DTYPE, is_quantised
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

    def with_blocks(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """The tensor's full shape."""
        return (2, self.layers_per_block, num_blocks, self.block_size, self.local_num_kv_heads, self.head_dim)

    def scales_with_blocks(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """The full shape of a quantised cache's scales."""
        return (2, self.layers_per_block, num_blocks, self.local_num_kv_heads, self.block_size)


class KvCacheLayer(Protocol):
    """An attention layer, as far as its cache is concerned."""

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
        """Take (2, blocks, block_size, local KV heads, head_dim), and (2, blocks, local KV heads, block_size)."""


def allocate_kv_cache(shape: KvCacheShape, num_blocks: int, device: torch.device) -> torch.Tensor:
    """A zeroed cache of ``num_blocks`` on ``device``; raises ``MemoryBudgetError`` if there is no memory for it.

    On CPU it is mapped, not written: the kernel provides a zeroed page when a block is first used.
    """
    try:
        return _zeros(shape.with_blocks(num_blocks), shape.dtype, device)
    except (RuntimeError, OSError, OverflowError) as error:
        raise _no_room(shape, num_blocks, device, error) from error


def allocate_kv_scales(shape: KvCacheShape, num_blocks: int, device: torch.device) -> torch.Tensor | None:
    """The zeroed scales of a quantised cache; None for any other.  Raises as ``allocate_kv_cache``."""
    if not is_quantised(shape.dtype):
        return None
    try:
        return _zeros(shape.scales_with_blocks(num_blocks), SCALE_DTYPE, device)
    except (RuntimeError, OSError, OverflowError) as error:
        raise _no_room(shape, num_blocks, device, error) from error


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    return map_zeros(math.prod(sizes) * dtype.itemsize).view(dtype).view(sizes)


def _no_room(shape: KvCacheShape, num_blocks: int, device: torch.device, error: Exception) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"can not allocate {format_gib(num_blocks * shape.block_bytes)} for {num_blocks} KV blocks on {device} "
        f"({error}); lower gpu_memory_utilization, num_gpu_blocks_override or kv_cache_memory_bytes"
    )


def bind_kv_cache(
    kv_cache: torch.Tensor, layers: Sequence[KvCacheLayer], layout: KvLayout, kv_scales: torch.Tensor | None = None
) -> None:
    """Give each layer the view ``kv_cache[:, i]`` of its place i; there must be as many layers as ``layout`` has."""
    num_layers = sum(len(group.layers) for group in layout.groups)
    assert len(layers) == num_layers, f"{len(layers)} attention layers for a cache of {num_layers}"
    assert kv_cache.shape[1] == layout.layers_per_block, (kv_cache.shape, layout)
    for index, layer in enumerate(layers):
        _, place = layout.place_of(index)
        layer.bind_kv_cache(kv_cache[:, place], None if kv_scales is None else kv_scales[:, place])


def resident_bytes(kv_cache: torch.Tensor) -> int:
    """Bytes of a CPU cache that occupy memory because they have been used."""
    num_bytes = kv_cache.numel() * kv_cache.itemsize
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    in_core = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(kv_cache.data_ptr()), ctypes.c_size_t(num_bytes), in_core) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int(torch.frombuffer(in_core, dtype=torch.uint8).bitwise_and_(1).sum()) * mmap.PAGESIZE
