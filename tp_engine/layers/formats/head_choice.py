"""The LM head that chooses tokens instead of writing logits, for a few rows on a GPU.

It serves recorded decode steps whose rows are greedy or have a temperature alone; what needs logits (penalties,
filters, log-probabilities, steps that are launched) still asks the head's product for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tp_engine.kernels.ops import has_triton
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.layers.formats.base import Product
from tp_engine.layers.formats.dense import PlainLinear, runs_triton
from tp_engine.layers.formats.few_rows import HEAD_MOST_ROWS, FewRowsLinear, most_rows_of

if TYPE_CHECKING:
    from tp_engine.kernels.sampling.best_triton import BestTokens


class HeadChoice:
    """The choice by a ``weight`` (out, in), whose first ``num_ids`` rows are the tokens from ``first_id`` on.

    Logits are multiplied by ``scale``, then bounded by ``softcap``.  It takes up to ``most_rows`` rows.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        first_id: int,
        num_ids: int,
        scale: float,
        softcap: float | None,
        most_rows: int,
    ) -> None:
        from tp_engine.kernels.linear.head_choice_triton import head_choice_triton, head_sizes

        self._weight, self._first_id, self._num_ids = weight, first_id, num_ids
        self._scale, self._softcap, self._most_rows = scale, softcap, most_rows
        self._choose, self._sizes = head_choice_triton, head_sizes

    def takes(self, num_rows: int) -> bool:
        """Whether it takes so many rows."""
        return 0 < num_rows <= self._most_rows

    def __call__(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: SamplingTables,
        advanced: RowTables | None,
    ) -> BestTokens:
        """The best tokens of this rank for ``hidden`` (n, in); the others as for ``best_tokens_triton``."""
        return self._choose(
            hidden,
            self._weight,
            rows,
            positions,
            tables,
            first_id=self._first_id,
            num_ids=self._num_ids,
            scale=self._scale,
            softcap=self._softcap,
            sizes=self._sizes(self._weight, len(hidden)),
            advanced=advanced,
        )


def choose_head_choice(
    product: Product, *, first_id: int, num_ids: int, scale: float, softcap: float | None
) -> HeadChoice | None:
    """The choice by a head with this ``product``; None if the head only writes logits.

    It takes weights of the model's own type without a bias, split or whole, tied or not; not quantised ones, nor those
    of ``tp_invariant``, whose sums are trees.
    """
    if not (isinstance(product, (PlainLinear, FewRowsLinear)) and has_triton()):
        return None
    from tp_engine.kernels.linear.head_choice_triton import takes_head

    weight = product.weight
    if not (runs_triton(weight.device.type) and takes_head(weight)):
        return None
    most_rows = most_rows_of(HEAD_MOST_ROWS, weight)
    if not most_rows:
        return None
    return HeadChoice(weight, first_id=first_id, num_ids=num_ids, scale=scale, softcap=softcap, most_rows=most_rows)
