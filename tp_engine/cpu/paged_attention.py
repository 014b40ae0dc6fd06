"""Attention over the paged cache by ``attention.c``."""

import ctypes
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.cpu.layout import CACHE_CODES, DTYPE_CODES, AttentionLayer, Step
from tp_engine.cpu.tape import address_of
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.kv_cache.layer_kv import SCALE_DTYPE, KeyValue
from tp_engine.plan import IntArray

_LayerPointer: TypeAlias = "ctypes._Pointer[AttentionLayer]"


def in_kernel_order(library: ctypes.CDLL, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``kv_cache`` (2, blocks, block_size, KV heads, head_dim) as ``attention.c`` keeps it, in that
    shape.

    Inside a block the heads come first; values are rows of head_dim, and keys columns: the first 4 bytes of some tokens
    side by side, then the next 4 bytes of them.  A cache with one part has rows only.
    """
    if len(kv_cache) == 1:
        return kv_cache.transpose(2, 3).contiguous().view(kv_cache.shape)
    block_size, num_bytes = kv_cache.shape[2], kv_cache.shape[4] * kv_cache.itemsize
    assert num_bytes % 4 == 0, f"a row of {num_bytes} bytes has no whole items"
    keys, values = kv_cache.transpose(2, 3).contiguous()
    simd_width = min(library.attention_lanes(), block_size)
    columns = keys.view(torch.int32).unflatten(2, (block_size // simd_width, simd_width)).transpose(3, 4).contiguous()
    return torch.stack((columns.view(kv_cache.dtype).view(kv_cache[0].shape), values.view(kv_cache[0].shape)))


class PagedAttention:
    """The kernel of ``library`` with one step's batch, given once for all layers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.paged_attention
        self._step_pointer: ctypes._Pointer[Step] | None = None
        # By the address of the cache: the facts that a description was made from, and the description.
        self._layers: dict[int, tuple[tuple[object, ...], _LayerPointer]] = {}

    def set_step(
        self,
        query_lens: IntArray,
        starts: IntArray,
        seq_lens: IntArray,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """``query_lens``, ``starts`` (a request's first token), ``seq_lens`` (B,) int32, ``block_table`` (B, M) int32,
        ``slot_mapping`` (N,) int64; requests without queries are left out.  A recorded step keeps its description."""
        lengths = [np.ascontiguousarray(array, dtype=np.int32) for array in (query_lens, starts, seq_lens)]
        assert block_table.stride(1) == 1 and slot_mapping.is_contiguous()
        step = Step(
            len(query_lens), len(slot_mapping), *(array.ctypes.data for array in lengths),
            address_of(block_table, torch.int32), block_table.stride(0), address_of(slot_mapping, torch.int64),
            torch.get_num_threads(),
        )  # fmt: skip
        step.arrays = (*lengths, block_table, slot_mapping)
        self._step_pointer = ctypes.pointer(step)

    def __call__(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        chosen: ChosenKeys | None = None,
    ) -> None:
        """Store ``new`` keys and values (N, KV heads, head_dim) unless it is None, then attend.

        ``query`` (N, heads, head_dim), each token's heads side by side; ``kv_cache`` (parts, blocks, block_size, KV
        heads, head_dim) and its ``scales`` as in layer_kv.py, each block in the order of ``in_kernel_order``; ``out``
        (N, heads, size of a value), contiguous, is written for the step's requests; ``softcap`` and ``sinks`` (heads,)
        float32 as for ``attend``.  With one part, values are the first elements of the keys, and only keys are stored.
        Then requests with one query each may attend to ``chosen`` keys alone.
        """
        assert len(query) == len(out), (query.shape, out.shape)
        states, strides = ((None, None), (0, 0)) if new is None else (new, (new.key.stride(0), new.value.stride(0)))
        layer = self._layer(query, kv_cache, scales, out.shape[2], (scale, window, softcap), sinks)
        places = (None, 0, None) if chosen is None else (chosen.positions, chosen.positions.stride(0), chosen.counts)
        if self._attend(self._step_pointer, layer, query, *states, out, query.stride(0), *strides, *places):
            raise MemoryError("the attention kernel has no memory for its list of tasks")

    def _layer(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scales: torch.Tensor | None,
        value_dim: int,
        rule: tuple[float, int | None, float | None],
        sinks: torch.Tensor | None,
    ) -> _LayerPointer:
        """The kernel's description of a layer, made when it is first seen; ``rule``: scale, window, softcap."""
        address, num_heads = address_of(kv_cache), query.shape[1]
        sinks_address = None if sinks is None else address_of(sinks, torch.float32)
        places = (
            (None, None, 0)
            if scales is None
            else (*(address_of(scales[i], SCALE_DTYPE) for i in (0, -1)), scales.stride(1) * 4)
        )
        strides = (value_dim, kv_cache.stride(1))
        facts = (query.dtype, num_heads, kv_cache.dtype, kv_cache.shape, strides, places, rule, sinks_address)
        known = self._layers.get(address)
        if known is not None and known[0] == facts:
            return known[1]
        assert sinks is None or (sinks.is_contiguous() and len(sinks) == num_heads)
        scale, window, softcap = rule
        key_scales, value_scales, scale_bytes = places
        description = AttentionLayer(
            key_cache=address, value_cache=address_of(kv_cache[-1]), key_scales=key_scales, value_scales=value_scales,
            block_bytes=kv_cache.stride(1) * kv_cache.itemsize, scale_bytes=scale_bytes,
            block_size=kv_cache.shape[2], num_heads=num_heads, num_kv_heads=kv_cache.shape[3],
            head_dim=kv_cache.shape[4], value_dim=value_dim, values_in_keys=len(kv_cache) == 1, window=window or 0,
            cache_dtype=CACHE_CODES[kv_cache.dtype], dtype=DTYPE_CODES[query.dtype], sinks=sinks_address, scale=scale,
            softcap=softcap or 0.0,
        )  # fmt: skip
        description.sinks_tensor = sinks
        layer = ctypes.pointer(description)
        self._layers[address] = (facts, layer)
        return layer
