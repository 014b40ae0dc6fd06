"""DeepSeek sparse attention in plain PyTorch: attention to chosen keys alone (``kernels/attention/index_keys.py``
chooses)."""

from collections.abc import Callable
from typing import Protocol

import torch

from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

# Bounds the gathered rows that are in memory at a time.
_MAX_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


class Chooser(Protocol):
    """Chooses ``top_k`` keys for the layers that share a choice."""

    top_k: int

    @property
    def index_kv(self) -> LayerKv | None:
        """The cached index keys; None: there is no cache yet."""

    def chosen(self, start: int, length: int, keys: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The positions (length, top_k) that ``length`` of the step's tokens from ``start`` on, the last ones of their
        request, attend to; ``keys()`` are its index keys (n, dim)."""

    def of_rows(self, start: int, block_table: torch.Tensor, seq_lens: torch.Tensor) -> ChosenKeys:
        """The keys that n of the step's tokens from ``start`` on attend to: decodes, or the tokens of a prompt, with
        ``block_table`` (n, M) int32 and ``seq_lens`` (n,) int32, 0 for padding."""


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
