"""The functions that tp_engine calls in attention packages, as plain PyTorch loops with the documented semantics.

flash-attn 2.x (the module's two functions), flash-attn 3 (``version_3``), PyTorch's ``varlen_attn`` and flashinfer's
paged prefill wrapper.  Keyword names, shapes, types and the lower-right causal alignment follow the packages'
documentation; assertions refuse the arguments that a real kernel would refuse.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """``q`` (B, query_len, heads, head_dim) against the first ``cache_seqlens[b]`` tokens of each request's blocks."""
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(q),)
    out = torch.zeros_like(q)
    for request, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_paged(cache, block_table, request, length) for cache in (k_cache, v_cache))
        out[request] = _attend(q[request], keys, values, softmax_scale, causal, window_size, softcap)
    return out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """``q`` (tokens, heads, head_dim) of requests between ``cu_seqlens_q``; ``k`` and ``v`` are the paged cache."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
    query_lens, key_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(query_lens) == max_seqlen_q and max(key_lens) == max_seqlen_k
    assert int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0 and int(cu_seqlens_q[-1]) == len(q)
    out = torch.zeros_like(q)
    for request, length in enumerate(key_lens):
        keys, values = (_paged(cache, block_table, request, length) for cache in (k, v))
        mine = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        out[mine] = _attend(q[mine], keys, values, softmax_scale, causal, window_size, softcap)
    return out


def _with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Version 3: ``q`` as in version 2, or (tokens, heads, head_dim) of requests between ``cu_seqlens_q``."""
    rule = (softmax_scale, window_size, softcap)
    if cu_seqlens_q is None:
        assert q.shape[1] == 1 and max_seqlen_q is None
        lengths = (torch.arange(len(q) + 1, dtype=torch.int32), cache_seqlens, page_table)
        return _varlen(q[:, 0], k_cache, v_cache, *lengths, *rule).unsqueeze(1)
    assert causal and max_seqlen_q == int(cu_seqlens_q.diff().max())
    return _varlen(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, *rule)


version_3 = SimpleNamespace(flash_attn_with_kvcache=_with_kvcache_3)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """PyTorch's function: window (-1, 0) is causal without a limit."""
    assert seqused_k is not None and block_table is not None and scale is not None and num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2]) and window_size[1] == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert (cu_seq_k.diff() == seqused_k).all() and len(query) == int(cu_seq_q[-1])
    return _varlen(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size)


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer's wrapper: sums of lengths on the host; the block ids of all requests, joined, on the device."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **rule: Any,
    ) -> None:
        assert {states.dtype for states in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        assert paged_kv_last_page_len.dtype == torch.int32 and rule["causal"]
        counts = paged_kv_indptr.diff()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for request, count in enumerate(counts.tolist()):
            start = int(paged_kv_indptr[request])
            table[request, :count] = paged_kv_indices[start : start + count]
        self.seq_lens = (counts - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        self.heads, self.page_size, self.rule = (num_qo_heads, num_kv_heads, head_dim_qk), page_size, rule
        self.table, self.qo_indptr = table, qo_indptr

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], q.shape[2]) == self.heads and keys.shape[1] == self.page_size
        assert q.is_contiguous() and q.dtype == self.rule["q_data_type"] and keys.dtype == self.rule["kv_data_type"]
        rule = (self.rule["sm_scale"], (self.rule["window_left"], 0), self.rule["logits_soft_cap"] or 0.0)
        return _varlen(q, keys, values, self.qo_indptr, self.seq_lens, self.table, *rule)


def _varlen(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window_size: tuple[int, int],
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of requests between ``cu_seqlens_q`` over blocks of any size."""
    assert cu_seqlens_q.dtype == seq_lens.dtype == torch.int32 and int(cu_seqlens_q[0]) == 0
    assert int(cu_seqlens_q[-1]) == len(query)
    out = torch.zeros_like(query)
    for request, length in enumerate(seq_lens.tolist()):
        keys, values = (_paged(cache, block_table, request, length, 1) for cache in (key_cache, value_cache))
        mine = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        out[mine] = _attend(query[mine], keys, values, scale, True, window_size, softcap)
    return out


def _paged(
    cache: torch.Tensor, block_table: torch.Tensor, request: int, length: int, multiple: int = 256
) -> torch.Tensor:
    """The first ``length`` rows (length, KV heads, head_dim) of ``cache`` (blocks, block_size, KV heads, head_dim)."""
    block_size = cache.shape[1]
    assert block_size % multiple == 0, f"paged K/V needs blocks of a multiple of {multiple} tokens"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    blocks = block_table[request, : -(-length // block_size)].long()
    return cache[blocks].flatten(0, 1)[:length]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Query i sees key j where ``j <= i + keys - queries``, and within the window around that diagonal."""
    if not len(keys):
        return torch.zeros_like(query)
    left, right = window_size
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, 1).float() for states in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    diagonal = torch.arange(len(query))[:, None] + len(keys) - len(query)
    key = torch.arange(len(keys))[None]
    hidden = torch.zeros(len(query), len(keys), dtype=torch.bool)
    if causal:
        hidden |= key > diagonal
    if left >= 0:
        hidden |= key < diagonal - left
    if right >= 0:
        hidden |= key > diagonal + right
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
