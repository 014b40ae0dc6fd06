"""DeepSeek sparse attention in plain PyTorch: which keys a query attends to, and attention to these alone.

DeepSeek-V3.2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) has small *index keys* beside the latents, and for each
query some index queries q_h with weights w_h::

    score(t, s) = sum over h of  w_h max(0, q_h . k_s)                  float32; the scales are in w_h

A query attends to the ``top_k`` keys with the best scores among those that it sees; of equal scores the earlier
position is chosen, so a choice does not depend on chunks or on the batch.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tp_engine.kernels.kv_cache.layer_kv import LayerKv

# Bounds the scores of all index heads, and the rows that are gathered, of the queries that are worked on at once.
_MAX_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


class Chooser(Protocol):
    """What chooses keys for the layers that share a choice; ``top_k`` is how many."""

    top_k: int

    @property
    def index_kv(self) -> LayerKv | None:
        """The cached index keys; None: there is no cache yet."""

    def chosen(self, start: int, length: int, keys: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the positions (length, top_k) that the step's tokens from ``start`` on attend to, the last
        ``length`` tokens of their request; ``keys()`` are its index keys (n, dim)."""

    def new_keys(self, start: int, length: int) -> torch.Tensor:
        """Return the index keys (length, dim) that the step has made, of the same tokens."""


def choose(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int) -> torch.Tensor:
    """``queries`` (t, heads, dim) with ``weights`` (t, heads) float32, the last t of ``keys`` (n, dim) -> positions
    (t, top_k) int32 in rising order, then -1 where a query sees fewer keys."""
    num_queries, num_heads, _ = queries.shape
    num_keys, device = len(keys), queries.device
    count, wide = min(top_k, num_keys), keys.float().T
    out = torch.full((num_queries, top_k), -1, dtype=torch.int32, device=device)
    positions = torch.arange(num_keys, device=device)
    step = max(1, _MAX_ELEMENTS[device.type] // (num_heads * num_keys))
    for first in range(0, num_queries, step):
        own = slice(first, min(first + step, num_queries))
        products = (queries[own].float().flatten(0, 1) @ wide).relu_().view(-1, num_heads, num_keys)
        scores = torch.bmm(weights[own].unsqueeze(1), products).squeeze(1)
        last = torch.arange(own.start, own.stop, device=device).unsqueeze(1) + (num_keys - num_queries)
        is_seen = positions <= last
        scores.masked_fill_(~is_seen, -torch.inf)
        least = scores.topk(count).values[:, -1:]
        is_better, is_equal = scores > least, scores == least
        is_chosen = is_better | (is_equal & (is_equal.cumsum(1) <= count - is_better.sum(1, keepdim=True)))
        rows, found = (is_chosen & is_seen).nonzero().unbind(1)
        places = found.new_ones(len(found)).cumsum(0) - 1
        starts = torch.searchsorted(rows, torch.arange(len(scores), device=device))
        out[own][rows, places - starts[rows]] = found.int()
    return out


def attend_chosen(
    query: torch.Tensor,
    chosen: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    *,
    rank: int,
    scale: float,
) -> torch.Tensor:
    """``query`` (t, heads, row_dim) of the cached rows, ``chosen`` (t, k) positions, -1 for none -> (t, heads, rank).

    ``read`` (m,) positions -> (m, row_dim) rows, in the type of ``query``.
    """
    num_queries, count = chosen.shape
    out = query.new_empty(*query.shape[:2], rank)
    step = max(1, _MAX_ELEMENTS[query.device.type] // (count * query.shape[2]))
    for first in range(0, num_queries, step):
        own = slice(first, min(first + step, num_queries))
        rows = read(chosen[own].clamp(min=0).flatten().long()).view(-1, count, query.shape[2])
        scores = torch.bmm(query[own], rows.transpose(1, 2)).float().mul_(scale)
        scores.masked_fill_((chosen[own] < 0).unsqueeze(1), -torch.inf)
        out[own] = torch.bmm(scores.softmax(-1).to(query.dtype), rows[..., :rank])
    return out
