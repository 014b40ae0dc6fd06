"""The functions that tp_engine calls in attention packages, as plain PyTorch loops with the documented semantics.

flash-attn 2.x (the module's two functions) and flash-attn 3 (``version_3``).  Keyword names, shapes, types and the
lower-right causal alignment follow the packages' documentation; assertions refuse the arguments that a real kernel
would refuse.
"""

from __future__ import annotations

from types import SimpleNamespace

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
