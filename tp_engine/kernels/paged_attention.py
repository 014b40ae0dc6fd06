"""Causal attention over the paged cache: plain PyTorch, the twin of the paged Triton kernels."""

from __future__ import annotations

import torch

from tp_engine.kernels.kv_quant import dequantise, scales_at


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend request by request; the K/V of all tokens, this step's included, is in the cache.

    ``query`` (N, heads, head_dim); ``kv_cache`` (2, blocks, block_size, KV heads, head_dim), quantised if it has
    ``kv_scales`` (2, blocks, KV heads, block_size); ``block_table`` (B, M), ``seq_lens`` (B,), ``query_start`` (B + 1,)
    int32: request i's queries are the last of its ``seq_lens[i]`` tokens.  ``window`` counts the visible keys, self
    included.  Returns (N, heads, head_dim), zeros where a request has no tokens; products in the query's type.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    block_size = kv_cache.shape[2]
    for request, length in enumerate(lengths):
        mine = slice(starts[request], starts[request + 1])
        if not length or mine.start == mine.stop:
            continue
        position = torch.arange(length, device=query.device)
        slots = block_table[request, position // block_size].long() * block_size + position % block_size
        keys, values = (_read(kv_cache, part, slots, kv_scales).to(query.dtype) for part in (0, 1))
        own = position[length - (mine.stop - mine.start) :, None]
        hidden = (position > own) if window is None else (position > own) | (position <= own - window)
        out[mine] = _attend(query[mine], keys, values, hidden, scale)
    return out


def _read(kv_cache: torch.Tensor, part: int, slots: torch.Tensor, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """Keys or values (tokens, KV heads, head_dim) at ``slots`` (tokens,)."""
    states = kv_cache[part].flatten(0, 1)
    if kv_scales is None:
        return states[slots]
    return dequantise(states.view(torch.uint8)[slots].view(states.dtype), scales_at(kv_scales[part], slots))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """``query`` (q, heads, head_dim) over ``keys`` (k, KV heads, head_dim), except ``hidden`` (q, k)."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, dim=1).transpose(0, 1) for states in (keys, values))
    scores = (query.transpose(0, 1) @ keys.transpose(1, 2)).float() * scale
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    return (weights.to(query.dtype) @ values).transpose(0, 1)
