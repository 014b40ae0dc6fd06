"""The vocabulary, split over the ranks: embedding and output head.

The vocabulary is padded so that every rank holds the same number of rows; padded rows are zero, no token id points to
them, and their logits are cut off before anyone sees them::

    vocabulary 203, 2 ranks, alignment 16:   rank 0 [0 .. 111]   rank 1 [112 .. 202, 21 rows of padding]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.units import round_up

VOCAB_ALIGNMENT = 16


def padded_vocab_size(vocab_size: int, world_size: int) -> int:
    """Rows of all ranks together; each rank's share is a multiple of ``VOCAB_ALIGNMENT``."""
    return round_up(vocab_size, VOCAB_ALIGNMENT * world_size)


class VocabParallelEmbedding(nn.Module):
    """(N,) token ids -> (N, hidden).  Each rank looks up the ids of its own rows; the sum over ranks is the answer."""

    def __init__(self, vocab_size: int, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        info = context.communicator.info
        self._communicator = context.communicator
        self._num_rows = padded_vocab_size(vocab_size, info.world_size) // info.world_size
        self._first_row = info.rank * self._num_rows
        self.weight = context.empty(self._num_rows, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._communicator.info.world_size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first_row
        is_mine = (rows >= 0) & (rows < self._num_rows)
        hidden = F.embedding(rows.mul_(is_mine), self.weight).mul_(is_mine.unsqueeze(-1))
        return self._communicator.all_reduce(hidden)


class ParallelLMHead(LocalLinear):
    """(n, hidden) -> (n, vocab_size) on rank 0, None elsewhere.  ``tied`` shares the embedding's weight."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, context: LayerContext, tied: VocabParallelEmbedding | None = None
    ) -> None:
        world_size = context.communicator.info.world_size
        num_rows = padded_vocab_size(vocab_size, world_size) // world_size
        weight = tied.weight if tied is not None else None
        super().__init__(hidden_size, num_rows, bias=False, context=context, weight=weight)
        self._communicator = context.communicator
        self._vocab_size = vocab_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = self._communicator.gather(self._method(hidden, None))
        return logits[:, : self._vocab_size] if logits is not None else None
