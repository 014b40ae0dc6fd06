"""Causal attention over the paged cache: plain PyTorch, the twin of the paged Triton kernels."""

from __future__ import annotations

import torch

from tp_engine.kernels.attention_scores import softmax_weights
from tp_engine.kernels.kv_quant import dequantise, scales_at
from tp_engine.kernels.layer_kv import LayerKv


def paged_attention(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend request by request; the K/V of all tokens, this step's included, is in the cache.

    ``query`` (N, heads, head_dim); ``block_table`` (B, M), ``seq_lens`` (B,), ``query_start`` (B + 1,) int32: request
    i's queries are the last of its ``seq_lens[i]`` tokens.  ``window`` counts the visible keys, self included;
    ``softcap`` and ``sinks`` (heads,) float32 as in attention_scores.py.  Returns (N, heads, head_dim), zeros where a
    request has no tokens; the product with the values is of the query's type.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    block_size = kv.cache.shape[2]
    for request, length in enumerate(lengths):
        mine = slice(starts[request], starts[request + 1])
        if not length or mine.start == mine.stop:
            continue
        position = torch.arange(length, device=query.device)
        slots = block_table[request, position // block_size].long() * block_size + position % block_size
        keys, values = (_read(kv, part, slots).to(query.dtype) for part in (0, 1))
        own = position[length - (mine.stop - mine.start) :, None]
        hidden = (position > own) if window is None else (position > own) | (position <= own - window)
        scores = (_by_head(query[mine]) @ _by_head(keys, query.shape[1]).transpose(1, 2)).float() * scale
        weights = softmax_weights(
            scores,
            torch.where(hidden, float("-inf"), 0.0),
            softcap,
            None if sinks is None else sinks.view(-1, 1, 1),
        )
        out[mine] = (weights.to(query.dtype) @ _by_head(values, query.shape[1])).transpose(0, 1)
    return out


def _read(kv: LayerKv, part: int, slots: torch.Tensor) -> torch.Tensor:
    """Keys or values (tokens, KV heads, head_dim) at ``slots`` (tokens,)."""
    states = kv.cache[part].flatten(0, 1)
    if kv.scales is None:
        return states[slots]
    return dequantise(states.view(torch.uint8)[slots].view(states.dtype), scales_at(kv.scales[part], slots))


def _by_head(states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
    """``states`` (n, heads, head_dim) -> (heads, n, head_dim); fewer heads than ``num_heads`` are repeated."""
    if num_heads is not None:
        states = states.repeat_interleave(num_heads // states.shape[1], dim=1)
    return states.transpose(0, 1)
