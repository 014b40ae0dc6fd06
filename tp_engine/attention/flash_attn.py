"""Paged attention through the flash-attn package, 2.x (https://github.com/Dao-AILab/flash-attention)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.kv_store import fastest_store
from tp_engine.attention.needs import AttentionNeeds

BLOCK_SIZE_MULTIPLE = 256
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class _Prefills:
    """The part of the batch after the decodes: P requests, T tokens."""

    cu_seqlens_q: torch.Tensor  # (P + 1,) int32, where each request's queries start, from 0
    cu_seqlens_k: torch.Tensor  # (P + 1,) int32, likewise for all its computed tokens
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor  # (P, M) int32
    num_tokens: int


class FlashAttnBackend:
    """Decodes by ``flash_attn_with_kvcache``, everything else by ``flash_attn_varlen_func``; both read the paged cache,
    so cached prefixes and chunks need nothing special.

    ``package`` is the flash_attn module, imported unless given.
    """

    name = "flash_attn"
    can_capture_decodes = True

    def __init__(self, package: Any = None) -> None:
        package = package or _import_package()
        self._decode = package.flash_attn_with_kvcache
        self._varlen = package.flash_attn_varlen_func
        self._store_kv = fastest_store()
        self._prefills: _Prefills | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Cumulative lengths of the prefills; see ``AttentionBackend``."""
        self._prefills = None
        first = metadata.num_decodes
        if first == metadata.num_requests:
            return
        seq_lens = metadata.seq_lens[first:]
        cu_seqlens_k = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        self._prefills = _Prefills(
            cu_seqlens_q=metadata.query_start[first:] - metadata.query_start[first],
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=int(metadata.host_query_lens[first:].max()),
            max_seqlen_k=int(metadata.host_seq_lens[first:].max()),
            block_table=metadata.block_table[first:],
            num_tokens=int(metadata.host_query_lens[first:].sum()),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens of no request get zeros."""
        assert kv_scales is None, "why_not refuses a quantised cache"
        if key is not None and value is not None:
            self._store_kv(key, value, kv_cache, metadata.slot_mapping, None)
        parts, start = [], metadata.num_decodes
        if start:
            parts.append(self._attend_decodes(query[:start], kv_cache, metadata, shape))
        if self._prefills is not None:
            end = start + self._prefills.num_tokens
            parts.append(self._attend_prefills(query[start:end], kv_cache, self._prefills, shape))
            start = end
        if start < len(query):
            parts.append(torch.zeros_like(query[start:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """``query`` (D, heads, head_dim), one token of each of the first D requests."""
        out: torch.Tensor = self._decode(
            query.unsqueeze(1),
            kv_cache[0],
            kv_cache[1],
            cache_seqlens=metadata.seq_lens[: len(query)],
            block_table=metadata.block_table[: len(query)],
            softmax_scale=shape.scale,
            causal=True,
            window_size=_window_size(shape),
        )
        return out.squeeze(1)

    def _attend_prefills(
        self, query: torch.Tensor, kv_cache: torch.Tensor, prefills: _Prefills, shape: AttentionShape
    ) -> torch.Tensor:
        """``query`` (T, heads, head_dim); causal from the lower right: a request's last query sees its last key."""
        out: torch.Tensor = self._varlen(
            query,
            kv_cache[0],
            kv_cache[1],
            cu_seqlens_q=prefills.cu_seqlens_q,
            cu_seqlens_k=prefills.cu_seqlens_k,
            max_seqlen_q=prefills.max_seqlen_q,
            max_seqlen_k=prefills.max_seqlen_k,
            softmax_scale=shape.scale,
            causal=True,
            window_size=_window_size(shape),
            block_table=prefills.block_table,
        )
        return out


def _import_package() -> Any:
    import flash_attn

    return flash_attn


def _window_size(shape: AttentionShape) -> tuple[int, int]:
    """Keys to the left and right of the own one; -1 is no limit."""
    return (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)


def why_not(needs: AttentionNeeds) -> str | None:
    """What keeps this backend from being used, with the remedy; None if it can be used."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if find_spec("flash_attn") is None:
        return "the flash-attn package is not installed; `pip install flash-attn`, or use another attention_backend"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {needs.dtype}; set dtype, or use another attention_backend"
    if needs.kv_cache_dtype != needs.dtype:
        return f"kv_cache_dtype is {needs.kv_cache_dtype} but dtype is {needs.dtype}; it needs both equal"
    if needs.block_size % BLOCK_SIZE_MULTIPLE:
        return f"block_size is {needs.block_size}; it needs a multiple of {BLOCK_SIZE_MULTIPLE}: set block_size=256"
    if needs.head_dim > MAX_HEAD_DIM or needs.head_dim % HEAD_DIM_MULTIPLE:
        return (
            f"head_dim is {needs.head_dim}; it needs a multiple of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM}: use "
            f"another attention_backend"
        )
    return None
