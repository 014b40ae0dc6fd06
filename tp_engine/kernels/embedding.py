"""Embedding of this rank's part of the vocabulary: plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embed(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0) -> torch.Tensor:
    """``token_ids`` (N,) -> (N, hidden): rows of ``weight`` (ids, hidden) times ``scale``; the first is ``first_id``'s.

    Ids that it does not hold give zeros; with ``first_id`` None it holds all.
    """
    if first_id is None:
        rows = F.embedding(token_ids, weight)
    else:
        own = token_ids - first_id
        is_mine = (own >= 0) & (own < len(weight))
        rows = F.embedding(own.mul_(is_mine), weight).mul_(is_mine.unsqueeze(-1))
    return rows if scale == 1.0 else rows.mul_(scale)
