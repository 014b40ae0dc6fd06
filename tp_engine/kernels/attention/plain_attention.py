"""Attention in plain PyTorch, with caps and sinks: over given keys, and over the paged cache.

::

    score  = scale * q . k                  with a softcap: cap * tanh(score / cap), before the mask
    weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink))          without a sink: over keys alone

A sink is an extra score of a head that takes part in the sum and has no value.  ``scaled_dot_product_attention`` has no
caps and no sinks.  ``paged_attention`` is the twin of the paged kernels, in Triton and in C.
"""

import torch

from tp_engine.kernels.kv_cache.layer_kv import LayerKv, states_at
from tp_engine.kernels.layer_ops import widened

# Scores that are in memory at a time.
_MAX_SCORES = 1 << 24


def softmax_weights(
    scores: torch.Tensor, hidden: torch.Tensor | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Weights (..., q, k) of ``scores`` (..., q, k), which may be overwritten; the rest as for ``attend``."""
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores = scores + hidden
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``query`` (..., q, d) over ``keys`` and ``values`` (..., k, d) -> (..., q, d); the leading axes broadcast.

    ``hidden`` (..., q, k) is added to the scores: 0, or -inf where a key is hidden.  ``sinks`` (..., q, 1).  Scores
    are float32 (float64 for float64); the product with the values is of the query's type.
    """
    num_queries, num_keys = query.shape[-2], keys.shape[-2]
    width = query.shape[:-2].numel() * num_keys
    step = max(1, _MAX_SCORES // max(width, 1))
    out = torch.empty((*query.shape[:-1], values.shape[-1]), dtype=query.dtype, device=query.device)
    for start in range(0, num_queries, step):
        rows = slice(start, min(start + step, num_queries))
        weights = softmax_weights(
            (widened(query[..., rows, :]) @ widened(keys).transpose(-1, -2)).mul_(scale),
            _rows_of(hidden, rows),
            softcap,
            _rows_of(sinks, rows),
        )
        out[..., rows, :] = weights.to(query.dtype) @ values
    return out


def _rows_of(states: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """The ``rows`` of ``states`` (..., q, n); all of (..., 1, n), which is the same for all queries."""
    return states if states is None or states.shape[-2] == 1 else states[..., rows, :]


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
    value_dim: int | None = None,
) -> torch.Tensor:
    """Attend request by request; the K/V of all tokens, those of this step included, is in the cache.

    ``query`` (N, heads, head_dim); ``block_table`` (B, M), ``seq_lens`` (B,), ``query_start`` (B + 1,) int32: request
    i's queries are the last of its ``seq_lens[i]`` tokens.  ``window`` counts the visible keys, self included;
    ``softcap`` and ``sinks`` (heads,) float32 as in the module's text.  Returns (N, heads, head_dim), zeros where a
    request has no tokens; the product with the values is of the query's type.  With ``value_dim`` the cache has one
    part: values are the first ``value_dim`` elements of its keys, and the result is as wide.
    """
    out = query.new_zeros(*query.shape[:2], value_dim or query.shape[2])
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    block_size = kv.cache.shape[2]
    for request, length in enumerate(lengths):
        mine = slice(starts[request], starts[request + 1])
        if not length or mine.start == mine.stop:
            continue
        position = torch.arange(length, device=query.device, dtype=torch.int64)
        slots = block_table[request, position // block_size].long() * block_size + position % block_size
        keys = states_at(kv, 0, slots).to(query.dtype)
        values = keys[..., :value_dim] if value_dim is not None else states_at(kv, 1, slots).to(query.dtype)
        own = position[length - (mine.stop - mine.start) :, None]
        hidden = (position > own) if window is None else (position > own) | (position <= own - window)
        scores = (_by_head(query[mine]) @ _by_head(keys, query.shape[1]).transpose(1, 2)).float() * scale
        weights = softmax_weights(
            scores, torch.where(hidden, float("-inf"), 0.0), softcap, None if sinks is None else sinks.view(-1, 1, 1)
        )
        out[mine] = (weights.to(query.dtype) @ _by_head(values, query.shape[1])).transpose(0, 1)
    return out


def _by_head(states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
    """``states`` (n, heads, head_dim) -> (heads, n, head_dim); fewer heads than ``num_heads`` are repeated."""
    if num_heads is not None:
        states = states.repeat_interleave(num_heads // states.shape[1], dim=1)
    return states.transpose(0, 1)
