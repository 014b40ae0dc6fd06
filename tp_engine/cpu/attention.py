"""Paged attention on CPUs by a compiled kernel, which stores this step's K/V and reads the cache in place."""

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.library import native_library
from tp_engine.cpu.kernels.paged_attention import PagedAttention
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv

MAX_HEAD_DIM, MAX_ROW_DIM = 512, 576


class NativeBackend:
    """One call per layer, for decodes and chunks alike: a request's result does not depend on the rest of the batch."""

    name = "native"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self) -> None:
        library = native_library()
        assert library is not None, "why_not comes first"
        self._kernel, self._rows_kernel = PagedAttention(library), PagedAttention(library)
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
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        return self.forward_chosen(query, new, kv, None, shape)

    def forward_chosen(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        chosen: ChosenKeys | None,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Do the same for decodes that attend to ``chosen`` keys; None: to all."""
        assert kv.scales is None, "why_not refuses a quantised cache"
        query, size = _with_dense_tokens(query), shape.value_dim or shape.head_dim
        if new is not None:
            key = _with_dense_tokens(new.key)
            new = KeyValue(key, key if shape.value_dim else _with_dense_tokens(new.value))
        out = (torch.zeros if self._has_padding else torch.empty)((*query.shape[:2], size), dtype=query.dtype)
        self._kernel(
            query, new, kv.cache, out,
            scale=shape.scale, window=shape.sliding_window, softcap=shape.softcap, sinks=shape.sinks,
            chosen=chosen,
        )  # fmt: skip
        return out

    def attend_to_chosen(
        self, query: torch.Tensor, kv: LayerKv, chosen: ChosenKeys, block_table: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """Attend with rows that are requests of their own; see ``AttendsToChosen``."""
        count = len(query)
        ones, starts = np.ones(count, dtype=np.int32), np.arange(count, dtype=np.int32)
        self._rows_kernel.set_step(
            ones, starts, chosen.counts.numpy(), block_table, torch.zeros(count, dtype=torch.int64)
        )
        out = torch.empty((count, shape.num_heads, shape.value_dim or shape.head_dim), dtype=query.dtype)
        self._rows_kernel(_with_dense_tokens(query), None, kv.cache, out, scale=shape.scale, chosen=chosen)
        return out


def _with_dense_tokens(states: torch.Tensor) -> torch.Tensor:
    """``states`` (N, heads, head_dim), copied unless each token's heads lie together."""
    is_dense = states.stride(2) == 1 and states.stride(1) == states.shape[2]
    return states if is_dense else states.contiguous()


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend can not be used, with the remedy; None if it can."""
    if needs.device_type != "cpu":
        return f"it runs on CPUs, not {needs.device_type}; use another attention_backend"
    for name, dtype in (("dtype", needs.dtype), ("kv_cache_dtype", needs.kv_cache_dtype)):
        if dtype not in DTYPE_CODES:
            return f"{name} is {dtype}; it knows float32, bfloat16 and float16: use attention_backend=torch"
    most = MAX_ROW_DIM if needs.has_latents else MAX_HEAD_DIM
    if odd := [size for size in needs.head_dims if size > most or size % 2]:
        return f"head_dim is {odd[0]}; it takes even ones up to {most}: use attention_backend=torch"
    if native_library() is None:
        return "its kernels are not available here (the log says why); use attention_backend=torch"
    return None
