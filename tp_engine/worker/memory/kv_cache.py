"""The KV cache of one rank: blocks, each one contiguous piece with all layers of a group.

::

    raw     (blocks, block_bytes) uint8         | block 0                                       | block 1 ...
                                                | K0 V0 K1 V1 ... | scales, if quantised | room |
    cache   (blocks, layers of the group, parts, block_size, local KV heads, head_dim)    0: keys, 1: values
    scales  (blocks, layers of the group, parts, local KV heads, block_size) float32      kernels/kv_cache/layer_kv.py
    a layer's view is (parts, blocks, block_size, local KV heads, head_dim): of the layer with place i in its group

A block belongs to one group of layers at a time (kv_layout.py), so each group has a view of all blocks, in the shape of
its layers; only the largest group leaves no room. Index keys (kv_layout.py) come behind K/V, their scales last. The
attention backend decides the order inside of a block; on CPUs it is another. Whatever moves blocks moves ``raw``.
Where a row stands for several tokens, a block has fewer rows.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tp_engine.errors import MemoryBudgetError
from tp_engine.kernels.huge_pages import map_zeros
from tp_engine.kernels.kv_cache.layer_kv import SCALE_DTYPE, is_quantised, layer_view
from tp_engine.layers.attention import Attention
from tp_engine.layers.upload import upload
from tp_engine.model_config.kv_layout import KvLayout
from tp_engine.plan import IntArray
from tp_engine.system.units import format_gib

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class GroupViews(NamedTuple):
    """All blocks as one group's layers see them: ``cache``, and ``scales`` of a quantised one, as in the module's
    text."""

    cache: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheShape:
    """All of the cache's dimensions but the number of blocks."""

    layout: KvLayout
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.layout.block_bytes(self.block_size, self.dtype.itemsize, has_scales=is_quantised(self.dtype))

    def views_of(self, raw: torch.Tensor, group: int = 0) -> GroupViews:
        """Return what a group's layers see of ``raw`` (n, block_bytes), contiguous.

        Strides do not depend on n, so kernels that are compiled for one block suit any number.
        """
        own = self.layout.groups[group]
        pieces, heads = (len(own.layers), own.num_parts), own.local_num_kv_heads
        num_rows = own.num_rows(self.block_size)
        cache = _views(raw, self.dtype, 0, (*pieces, num_rows, heads, own.head_dim))
        if not is_quantised(self.dtype):
            return GroupViews(cache, None)
        end = own.value_bytes(self.block_size, self.dtype.itemsize)
        return GroupViews(cache, _views(raw, SCALE_DTYPE, end, (*pieces, heads, num_rows)))

    def index_views_of(self, raw: torch.Tensor, group: int = 0) -> GroupViews | None:
        """Return the index keys (n, layers with some, 1, block_size, 1, dim) of a group, and their scales; None: it has
        none."""
        own = self.layout.groups[group]
        if not own.index_layers:
            return None
        count, size = len(own.index_layers), self.block_size
        begin, num_rows = own.kv_bytes(size, self.dtype.itemsize), own.num_rows(size)
        keys = _views(raw, self.dtype, begin, (count, 1, num_rows, 1, own.index_dim))
        if not is_quantised(self.dtype):
            return GroupViews(keys, None)
        end = own.value_bytes(size, self.dtype.itemsize) + own.kv_scale_bytes(size)
        return GroupViews(keys, _views(raw, SCALE_DTYPE, end, (count, 1, 1, num_rows)))


def _views(raw: torch.Tensor, dtype: torch.dtype, begin: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """(n, *sizes) of ``dtype``: the part of each row of ``raw`` (n, bytes) that begins at byte ``begin``."""
    strides = (raw.shape[1] // dtype.itemsize, *(math.prod(sizes[i + 1 :]) for i in range(len(sizes))))
    return raw.flatten().view(dtype).as_strided((len(raw), *sizes), strides, begin // dtype.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class KvBlocks:
    """Zeroed blocks of ``shape``: ``raw``, and the views of each group, which share its memory."""

    shape: KvCacheShape
    raw: torch.Tensor
    views: tuple[GroupViews, ...]

    @classmethod
    def allocate(cls, shape: KvCacheShape, num_blocks: int, device: torch.device) -> KvBlocks:
        """Blocks on ``device``; raises ``MemoryBudgetError`` if there is no memory for them."""
        raw = allocate_zeros(
            num_blocks * shape.block_bytes,
            device,
            content=f"{num_blocks} KV blocks",
            options="gpu_memory_utilization, num_gpu_blocks_override or kv_cache_memory_bytes",
        ).view(num_blocks, shape.block_bytes)
        return cls(shape, raw, tuple(shape.views_of(raw, group) for group in range(len(shape.layout.groups))))

    def bind(self, layers: Sequence[Attention]) -> None:
        """Give each layer the view of its place; there must be as many layers as the layout has."""
        layout = self.shape.layout
        own = layout.layers
        assert len(layers) == len(own), f"{len(layers)} attention layers for a cache of {len(own)}"
        for index, layer in zip(own, layers, strict=True):
            group, place = layout.place_of(index)
            layer.bind_kv_cache(*_at(self.views[group], place))
            index_views = self.shape.index_views_of(self.raw, group)
            indexed = layout.groups[group].index_layers
            if index_views is not None and index in indexed:
                layer.bind_index_keys(*_at(index_views, indexed.index(index)))

    def copy(self, pairs: IntArray) -> None:
        """Copy whole blocks by ``pairs`` (n, 2) of source and target; all are read before any is written."""
        copy_rows(self.raw, pairs)


def _at(views: GroupViews, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the layer at ``place`` sees."""
    return layer_view(views.cache, place), None if views.scales is None else layer_view(views.scales, place)


def copy_rows(raw: torch.Tensor, pairs: IntArray) -> None:
    """Copy rows of ``raw`` (rows, n) by ``pairs`` (m, 2) of source and target; all are read before any is written.

    Targets are distinct.  Rows are as large as megabytes, and there may be hundreds: a copy of all sources would need
    memory that no ledger has counted, so only rows that are exchanged with each other get one.
    """
    words = raw.view(next(word for word in _WORDS if raw.shape[1] * raw.itemsize % word.itemsize == 0))
    while len(pairs):
        is_awaited = np.isin(pairs[:, 1], pairs[:, 0])  # the target is the source of a copy that is still to be made
        ready = pairs[~is_awaited]
        if not len(ready):
            sources, targets = (upload(ids.astype(np.int64), raw.device) for ids in pairs.T)
            words[targets] = words[sources]
            return
        sources, targets = ready.T.tolist()
        torch._foreach_copy_([words[row] for row in targets], [words[row] for row in sources])
        pairs = pairs[is_awaited]


def allocate_zeros(num_bytes: int, device: torch.device, *, content: str, options: str) -> torch.Tensor:
    """Zeros (num_bytes,) uint8 on ``device``; on CPUs the system provides a page when it is first used.

    If there is no memory for ``content``, raises ``MemoryBudgetError``, which names the ``options`` to lower.
    """
    try:
        if device.type == "cpu":
            return map_zeros(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, OSError, OverflowError) as error:
        raise MemoryBudgetError(
            f"cannot allocate {format_gib(num_bytes)} for {content} on {device} ({error}); lower {options}"
        ) from error


def resident_bytes(raw: torch.Tensor) -> int:
    """Bytes of ``raw``, a contiguous tensor on the CPU, that occupy memory because they have been used."""
    num_bytes = raw.numel() * raw.itemsize
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    in_core = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(raw.data_ptr()), ctypes.c_size_t(num_bytes), in_core) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int(torch.frombuffer(in_core, dtype=torch.uint8).bitwise_and_(1).sum()) * mmap.PAGESIZE
