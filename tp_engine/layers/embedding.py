"""The vocabulary, split over the ranks: embedding and output head.

The vocabulary is padded so that every rank holds the same number of rows; padding rows are zero, no token id points to
them, and their logits are cut off::

    vocabulary 203, 2 ranks, alignment 16:   rank 0 [0 .. 111]   rank 1 [112 .. 202, 21 rows of padding]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tp_engine.cpu import PackedWeight
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.base import LinearFormat, ParameterFactory, Product, TunedFormat
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config import padded_vocab_size
from tp_engine.weights.source import Decode, Span, as_stored, vocab_share

Lookup: TypeAlias = Callable[[torch.Tensor, int | None, float], torch.Tensor]
"""``lookup(token_ids, first_id, scale)``: ``kernels.layer_ops.embed`` with its own weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabSlice:
    """The token ids ``first`` to ``first + num_ids - 1``, which one rank holds; ``num_ids`` may be 0.

    A rank's logits have ``width`` columns, equally many on every rank: one for each of these ids, then padding.
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
        """The columns of those ``token_ids`` (c,) that belong to the slice, in their order."""
        return token_ids[self.holds(token_ids)] - self.first


class VocabParallelEmbedding(Layer):
    """(N,) token ids -> (N, hidden).  Each rank looks up the ids of its own rows; the result is the sum over ranks.

    Rows are multiplied by ``scale``, rounded to their type.  With an ``eps``, they are normalised as they are loaded.
    ``reduced_bytes`` of each token are summed over the ranks.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        context: LayerContext,
        scale: float = 1.0,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        order = as_stored if eps is None else partial(_normalised, eps=eps)
        self._communicator = context.communicator
        self._num_rows = padded_vocab_size(vocab_size, context.world_size) // context.world_size
        self._first_row = context.rank * self._num_rows
        self.weight: nn.Parameter | None = context.parameter(
            (self._num_rows, hidden_size),
            _vocab_shape(vocab_size, hidden_size, self._num_rows, context, order).sources(),
        )
        self._scale = torch.tensor(scale, dtype=context.dtype, device="cpu").item()
        self.reduced_bytes = hidden_size * context.dtype.itemsize
        self._embed = context.op("embed")
        self._lookup: Lookup | None = None
        self.is_recordable = context.can_record("embed")

    def read_from(self, lookup: Lookup) -> None:
        """Drop the weight and read its rows from ``lookup``."""
        self.weight, self._lookup = None, lookup

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        first_row = None if self._communicator.info.world_size == 1 else self._first_row
        if self._lookup is not None:
            return self._communicator.all_reduce(self._lookup(token_ids, first_row, self._scale))
        assert self.weight is not None
        return self._communicator.all_reduce(self._embed(token_ids, self.weight, first_row, self._scale))


class ParallelLMHead(LocalLinear):
    """(n, hidden) -> (n, width), this rank's slice of the logits.  ``tied`` shares its weight, even if it is in panels.

    With a ``bias``, each token's logit has one.  Logits are multiplied by ``scale``, then bounded by ``softcap``.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        context: LayerContext,
        tied: VocabParallelEmbedding | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        bias: bool = False,
    ) -> None:
        num_rows = padded_vocab_size(vocab_size, context.world_size) // context.world_size
        shape = _vocab_shape(vocab_size, hidden_size, num_rows, context)
        own = context.format_of([context.path])
        chosen = own if tied is None else _Tied(own, tied)
        super().__init__(shape, bias=bias, context=context.unadapted, format=chosen)
        self._share_rows = None if tied is None else tied.read_from
        self._communicator = context.communicator
        self.slice = VocabSlice.of_rank(vocab_size, context.communicator.info)
        self._bounds = scale, softcap
        self._is_bounded = scale != 1.0 or softcap is not None
        self._cap_logits = context.op("cap_logits")
        self._caps_recorded = not self._is_bounded or context.can_record("cap_logits")

    def finish_loading(self) -> None:
        super().finish_loading()
        self.is_recordable = self.is_recordable and self._caps_recorded
        if self._share_rows is not None and isinstance(self._product, PackedWeight):
            self._share_rows(self._product.rows)

    def forward(self, hidden: Rows) -> torch.Tensor:
        logits = self.product(hidden, self.bias)[:, : self.slice.width]
        if self._is_bounded:
            self._cap_logits(logits, *self._bounds)
        return logits

    def gather(self, local_logits: torch.Tensor) -> torch.Tensor | None:
        """All ranks' slices (n, width) as (n, vocab_size) on rank 0, None elsewhere.  A collective."""
        logits = self._communicator.gather(local_logits)
        return logits[:, : self.slice.vocab_size] if logits is not None else None


class _Tied(Dense):
    """The embedding's weight, which the embedding loads, in another format."""

    def __init__(self, format: LinearFormat, embedding: VocabParallelEmbedding) -> None:
        self._format, self._embedding = format, embedding

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        return {}

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        assert self._embedding.weight is not None
        return self._format.finish({"weight": self._embedding.weight}, shape, dtype)

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        weight = self._embedding.weight
        if weight is None or not isinstance(self._format, TunedFormat):
            return None
        return self._format.tuned({"weight": weight}, shape, dtype, device_type)


def _normalised(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """``rows`` (n, hidden) by their root mean square, in float32."""
    return torch.nn.functional.rms_norm(rows.float(), rows.shape[-1:], eps=eps)


def _vocab_shape(
    vocab_size: int, hidden_size: int, num_rows: int, context: LayerContext, order: Decode = as_stored
) -> LinearShape:
    """This rank's rows of the vocabulary, in a weight of ``num_rows``."""
    rows = vocab_share(vocab_size, context.rank, num_rows)
    part = Part(name=context.path, stored_rows=vocab_size, rows=rows, room=num_rows, order=order)
    return LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=(part,))
