"""Paged attention on CPUs by a C kernel, which stores this step's K/V and reads the cache in place."""

import ctypes
import math

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape, LatentMaps
from tp_engine.cpu import DTYPE_CODES, PagedAttention, native_library
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.latents import HEADS_TOGETHER
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv

MAX_HEAD_DIM, MAX_ROW_DIM = 512, 576
# Bounds the keys and values of latent attention's heads in one call.
_MAX_EXPANDED_ELEMENTS = 1 << 23
# Tokens of a block, whose products fit into the second-level cache.
_EXPANDED_BLOCK = 512


class NativeBackend:
    """One call per layer, for decodes and chunks alike: a request's result does not depend on the rest of the batch."""

    name = "native"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self) -> None:
        library = native_library()
        assert library is not None, "why_not comes first"
        self._kernel, self._rows_kernel = PagedAttention(library), PagedAttention(library)
        self._expanded = ExpandedCache(library)
        self._has_padding = False

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Give the kernel this step's lengths; see ``AttentionBackend``."""
        self._has_padding = metadata.is_padded
        self._kernel.set_step(
            metadata.host_query_lens, metadata.query_start.numpy()[:-1], metadata.host_seq_lens, metadata.block_table,
            metadata.slot_mapping,
        )  # fmt: skip

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        return self.forward_chosen(query, new, kv, None, shape)

    def forward_chosen(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        chosen: ChosenKeys | None,
        shape: AttentionShape,
    ) -> torch.Tensor:
        query, size = _with_dense_tokens(query), shape.value_dim or shape.head_dim
        if new is not None:
            key = _with_dense_tokens(new.key)
            new = KeyValue(key, key if shape.value_dim else _with_dense_tokens(new.value))
        out = (torch.zeros if self._has_padding else torch.empty)(
            (*query.shape[:2], size), dtype=query.dtype, device="cpu"
        )
        self._kernel(
            query, new, kv.cache, out,
            scales=kv.scales, scale=shape.scale, window=shape.sliding_window, softcap=shape.softcap, sinks=shape.sinks,
            chosen=chosen,
        )  # fmt: skip
        return out

    def attend_to_chosen(
        self, query: torch.Tensor, kv: LayerKv, chosen: ChosenKeys, block_table: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        count = len(query)
        ones, starts = np.ones(count, dtype=np.int32), np.arange(count, dtype=np.int32)
        self._rows_kernel.set_step(
            ones, starts, chosen.counts.numpy(), block_table, torch.zeros(count, dtype=torch.int64, device="cpu")
        )
        out = torch.empty((count, shape.num_heads, shape.value_dim or shape.head_dim), dtype=query.dtype, device="cpu")
        self._rows_kernel(
            _with_dense_tokens(query), None, kv.cache, out, scales=kv.scales, scale=shape.scale, chosen=chosen
        )
        return out

    def attend_expanded(self, query: torch.Tensor, rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """Attend with a request's last tokens to keys and values made from its rows; see ``AttendsExpanded``."""
        maps, rank, num_queries, num_keys = shape.latent, shape.value_dim, len(query), len(rows)
        assert maps is not None and rank is not None
        num_groups = _MAX_EXPANDED_ELEMENTS // (2 * num_keys * maps.query_dim * HEADS_TOGETHER)
        num_heads, together = shape.num_heads, max(1, num_groups) * HEADS_TOGETHER
        blocks = torch.arange(-(-num_keys // _EXPANDED_BLOCK), dtype=torch.int32, device="cpu").unsqueeze(0)
        query_lens, starts, seq_lens = np.array([[num_queries], [0], [num_keys]], dtype=np.int32)
        slots = torch.zeros(num_queries, dtype=torch.int64, device="cpu")
        self._rows_kernel.set_step(query_lens, starts, seq_lens, blocks, slots)
        query, out = _with_dense_tokens(query), query.new_empty(num_queries, num_heads, maps.value_dim)
        for first in range(0, num_heads, together):
            heads = range(num_heads)[first : first + together]
            cache = self._expanded.fill(rows.squeeze(1), maps, rank, heads)
            own = query.new_empty(num_queries, len(heads), maps.value_dim)
            self._rows_kernel(query[:, heads.start : heads.stop], None, cache, own, scale=shape.scale)
            out[:, heads.start : heads.stop] = own
        return out


class ExpandedCache:
    """Keys and values of some heads, made from one request's rows, in a cache as ``PagedAttention`` reads it.

    Its memory is kept for the next call: fresh memory would cost page faults.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def fill(self, rows: torch.Tensor, maps: LatentMaps, rank: int, heads: range) -> torch.Tensor:
        """``rows`` (n, row_dim) -> (2, blocks, _EXPANDED_BLOCK, heads, query_dim), in the order of the tokens.

        ``heads`` begin at a multiple of HEADS_TOGETHER.  The next call overwrites the result.
        """
        (num_tokens, row_dim), dtype = rows.shape, rows.dtype
        rope_dim, num_blocks = row_dim - rank, -(-num_tokens // _EXPANDED_BLOCK)
        sizes = _EXPANDED_BLOCK, maps.query_dim - rope_dim, rope_dim, maps.value_dim
        cache = self._room((2, num_blocks, _EXPANDED_BLOCK, len(heads), maps.query_dim), dtype)
        for first in range(0, num_tokens, _EXPANDED_BLOCK):
            some = rows[first : first + _EXPANDED_BLOCK]
            turned = some.data_ptr() + rank * some.itemsize
            for head in range(0, len(heads), HEADS_TOGETHER):
                made = maps.up_project(some[:, :rank], heads.start + head)
                self._library.store_expanded(
                    made, turned, some.stride(0), cache[0], cache[1], first, len(some), head, made.shape[1], len(heads),
                    *sizes, dtype,
                )  # fmt: skip
        return cache

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if len(self._memory) < size or self._memory.dtype != dtype:
            with torch.inference_mode(False):  # else it could only be written in inference mode
                self._memory = torch.empty(size, dtype=dtype, device="cpu")
        return self._memory[:size].view(shape)


def _with_dense_tokens(states: torch.Tensor) -> torch.Tensor:
    """``states`` (N, heads, head_dim), copied unless each token's heads are contiguous."""
    is_dense = states.stride(2) == 1 and states.stride(1) == states.shape[2]
    return states if is_dense else states.contiguous()


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
    if needs.device_type != "cpu":
        return f"it runs on CPUs, not {needs.device_type}; use another attention_backend"
    if needs.dtype not in DTYPE_CODES:
        return f"dtype is {needs.dtype}; it knows float32, bfloat16 and float16: use attention_backend=torch"
    most, step = MAX_ROW_DIM if needs.has_latents else MAX_HEAD_DIM, max(2, 4 // needs.kv_cache_dtype.itemsize)
    if odd := [size for size in needs.head_dims if size > most or size % step]:
        return f"head_dim is {odd[0]}; it takes multiples of {step} up to {most}: use attention_backend=torch"
    if native_library() is None:
        return "its kernels are not available here (the log says why); use attention_backend=torch"
    return None
