"""Softmax attention in plain PyTorch, with what ``scaled_dot_product_attention`` does not know: caps and sinks.

::

    score  = scale * q . k                  with a softcap: cap * tanh(score / cap), before the mask
    weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink))           without a sink: of keys alone

A sink is an extra score of a head that takes part in the sum and has no value.
"""

from __future__ import annotations

import torch

from tp_engine.kernels.widening import widened

# Scores that are in memory at a time; queries beyond that wait for their turn.
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
    are float32 (of float64: float64), the product with the values is of the query's type.
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
    """Those of ``states`` (..., q, n), or the same for all queries: (..., 1, n)."""
    return states if states is None or states.shape[-2] == 1 else states[..., rows, :]
