"""Embedding of this rank's part of the vocabulary: plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embed(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None) -> torch.Tensor:
    """``token_ids`` (N,) -> (N, hidden): rows of ``weight`` (ids, hidden), whose first is that of ``first_id``.

    Ids that it does not hold give zeros; with ``first_id`` None it holds all.
    """
    if first_id is None:
        return F.embedding(token_ids, weight)
    rows = token_ids - first_id
    is_mine = (rows >= 0) & (rows < len(weight))
    return F.embedding(rows.mul_(is_mine), weight).mul_(is_mine.unsqueeze(-1))
