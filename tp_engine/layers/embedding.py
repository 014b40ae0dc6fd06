"""The vocabulary, split over the ranks: embedding and output head.

The vocabulary is padded so that every rank holds the same number of rows; padded rows are zero, no token id points to
them, and their logits are cut off before anyone sees them::

    vocabulary 203, 2 ranks, alignment 16:   rank 0 [0 .. 111]   rank 1 [112 .. 202, 21 rows of padding]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tp_engine.dist.rank import RankInfo
from tp_engine.kernels.ops import is_recordable, op
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.linear_method import PanelLinear, choose_linear_method
from tp_engine.units import round_up

VOCAB_ALIGNMENT = 16

Lookup: TypeAlias = Callable[[torch.Tensor, int | None, float], torch.Tensor]
"""``lookup(token_ids, first_id, scale)`` as ``kernels.embedding.embed``, of a weight of its own."""


def padded_vocab_size(vocab_size: int, world_size: int) -> int:
    """Rows of all ranks together; each rank's share is a multiple of ``VOCAB_ALIGNMENT``."""
    return round_up(vocab_size, VOCAB_ALIGNMENT * world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabSlice:
    """The token ids ``first`` to ``first + num_ids - 1``, which one rank holds; ``num_ids`` may be 0.

    They are the first columns of the rank's logits, of which there are ``width``, the same on every rank; the others
    are padding.
    """

    vocab_size: int
    first: int
    num_ids: int
    width: int

    @staticmethod
    def of_rank(vocab_size: int, info: RankInfo) -> VocabSlice:
        """The slice of one rank; a world of one holds the vocabulary without padding."""
        if info.world_size == 1:
            return VocabSlice(vocab_size=vocab_size, first=0, num_ids=vocab_size, width=vocab_size)
        width = padded_vocab_size(vocab_size, info.world_size) // info.world_size
        first = info.rank * width
        num_ids = min(max(vocab_size - first, 0), width)
        return VocabSlice(vocab_size=vocab_size, first=first, num_ids=num_ids, width=width)

    def holds(self, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of ``token_ids`` (c,) belong to the slice."""
        return (token_ids >= self.first) & (token_ids < self.first + self.num_ids)

    def columns_of(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The columns of those of ``token_ids`` (c,) that belong to the slice, in their order."""
        return token_ids[self.holds(token_ids)] - self.first


class VocabParallelEmbedding(nn.Module):
    """(N,) token ids -> (N, hidden), their rows times ``scale``.

    Each rank looks up the ids of its own rows; the sum over ranks is the answer.  ``is_recordable``: whether a tape can
    hold it.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, context: LayerContext, scale: float = 1.0) -> None:
        super().__init__()
        info = context.communicator.info
        self._communicator = context.communicator
        self._num_rows = padded_vocab_size(vocab_size, info.world_size) // info.world_size
        self._first_row = info.rank * self._num_rows
        self.weight: nn.Parameter | None = context.empty(self._num_rows, hidden_size)
        self._scale = scale
        self.is_recordable = is_recordable("embed", context.device.type)
        self._embed = op("embed", context.device.type)
        self._lookup: Lookup | None = None

    def read_from(self, lookup: Lookup) -> None:
        """Give the weight up: ``lookup`` has its rows."""
        self.weight, self._lookup = None, lookup

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        first_row = None if self._communicator.info.world_size == 1 else self._first_row
        if self._lookup is not None:
            return self._communicator.all_reduce(self._lookup(token_ids, first_row, self._scale))
        assert self.weight is not None
        return self._communicator.all_reduce(self._embed(token_ids, self.weight, first_row, self._scale))


class ParallelLMHead(LocalLinear):
    """(n, hidden) -> (n, width), this rank's slice of the logits.  ``tied`` shares its weight, in panels too.

    Its weight keeps the model's type, whatever ``quantization`` says: errors here reach the tokens directly.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, context: LayerContext, tied: VocabParallelEmbedding | None = None
    ) -> None:
        world_size = context.communicator.info.world_size
        num_rows = padded_vocab_size(vocab_size, world_size) // world_size
        weight = tied.weight if tied is not None else None
        super().__init__(
            hidden_size, num_rows, bias=False, context=context, weight=weight, make_method=choose_linear_method
        )
        self._share_rows = None if tied is None else tied.read_from
        self._communicator = context.communicator
        self.slice = VocabSlice.of_rank(vocab_size, context.communicator.info)

    def finish_loading(self) -> None:
        """See ``LocalLinear``."""
        super().finish_loading()
        if self._share_rows is not None and isinstance(self._method, PanelLinear):
            self._share_rows(self._method.weight.rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._method(hidden, None)[:, : self.slice.width]

    def gather(self, local_logits: torch.Tensor) -> torch.Tensor | None:
        """All ranks' slices (n, width) -> (n, vocab_size) on rank 0, None elsewhere.  A collective."""
        logits = self._communicator.gather(local_logits)
        return logits[:, : self.slice.vocab_size] if logits is not None else None
