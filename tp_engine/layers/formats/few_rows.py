"""Products with weights of the model's own type on a GPU: Triton's for few rows, the library's for more.

==========  ==========================================  ===================================================
rows        weights                                     by
==========  ==========================================  ===================================================
1           of whole blocks, no vocabularies            Triton: every program reads whole rows of the weight
2 to 256    of whole tiles, where ``MOST_ROWS`` says    Triton: matrix units, columns split over programs
more        any                                         PyTorch's library
==========  ==========================================  ===================================================

Triton's products also do what stands before and behind them in a decoder, for which there would be kernels of their
own: they normalise the rows that they read (``RowsToNorm``), activate gate and up, and add to the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.attention.triton_backend import num_multiprocessors
from tp_engine.env import few_rows_by
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.fused_linear import RowsToNorm
from tp_engine.kernels.ops import op
from tp_engine.kernels.quantised.row_codes import Rows
from tp_engine.layers.formats.base import Product
from tp_engine.model_config.mlp import Activation

# Up to how many elements of a weight, and the most rows for which Triton's tiles are taken.  None has been measured on
# a GPU yet: scripts/bench_few_rows.py prints both times for each line that this table could have.
MOST_ROWS: tuple[tuple[int, int], ...] = ((1 << 62, 1),)
# The same for LM heads that choose tokens themselves (``head_choice``); 0: never.
HEAD_MOST_ROWS: tuple[tuple[int, int], ...] = ((1 << 62, 0),)
# With more outputs, such as a vocabulary, the library reads the weight as fast as memory allows.
_MOST_OUTPUTS = 1 << 16


class FewRowsLinear:
    """The products of the table above; an ``activation`` is applied to gate and up.

    ``takes_one``: Triton multiplies a single row; ``most_rows``: the most rows that its tiles take, 0: none.
    """

    is_recordable = True

    def __init__(self, weight: torch.Tensor, activation: Activation | None, *, takes_one: bool, most_rows: int) -> None:
        from tp_engine.kernels.linear.few_rows_linear_triton import few_rows_linear_triton, linear_sizes
        from tp_engine.kernels.linear.one_row_linear_triton import one_row_linear_triton

        self.weight, self._activation = weight, activation
        self._takes_one, self._most_rows = takes_one, most_rows
        self._of_one_row, self._of_few_rows, self._sizes = one_row_linear_triton, few_rows_linear_triton, linear_sizes
        self._gate = op("gate", weight.device.type)
        self._arrivals = torch.zeros(len(weight) if most_rows else 0, dtype=torch.int32, device=weight.device)

    def __call__(
        self,
        x: torch.Tensor | RowsToNorm,
        bias: torch.Tensor | None,
        stream: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """``fused_linear.fused_linear``; the norm only if ``norms`` these rows, the stream only if ``fuses`` them."""
        return self._multiply(x, bias, self._activation, stream, scale)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``GatedProduct``."""
        return self._multiply(x, bias, None)

    def _multiply(
        self,
        x: torch.Tensor | RowsToNorm,
        bias: torch.Tensor | None,
        activation: Activation | None,
        stream: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        num_rows = len(x)
        if num_rows == 1 and self._takes_one:
            return self._of_one_row(x, self.weight, bias, activation, stream=stream, scale=scale)
        if self.fuses(num_rows):
            sizes = self._sizes(
                self.weight, num_rows, num_multiprocessors(self.weight.device), is_gated=activation is not None
            )
            return self._of_few_rows(
                x,
                self.weight,
                bias,
                activation,
                stream=stream,
                scale=scale,
                sizes=sizes,
                arrivals=self._arrivals,
            )
        assert isinstance(x, torch.Tensor) and stream is None, "the library only multiplies"
        product = F.linear(x, self.weight, bias)
        return product if activation is None else self._gate(product, activation)

    def fuses(self, num_rows: int) -> bool:
        """Whether the product of so many rows is Triton's."""
        return 0 < num_rows <= self._most_rows or (num_rows == 1 and self._takes_one)

    def norms(self, num_rows: int) -> bool:
        """Whether it also normalises them.  In tiles of float16, rows times a norm's gain might overflow."""
        is_exact = num_rows == 1 and self._takes_one
        return self.fuses(num_rows) and (is_exact or self.weight.dtype != torch.float16)


def choose_few_rows(weight: torch.Tensor, activation: Activation | None) -> FewRowsLinear | None:
    """The products of a ``weight`` (out, in) on a GPU with Triton; None if it leaves all rows to the library."""
    from tp_engine.kernels.linear import few_rows_linear_triton, one_row_linear_triton

    is_gated, most_rows = activation is not None, most_rows_of(MOST_ROWS, weight)
    if most_rows == 0 or len(weight) > _MOST_OUTPUTS:
        return None
    takes_one = one_row_linear_triton.takes_weight(weight, is_gated=is_gated)
    if most_rows == 1 or not few_rows_linear_triton.takes_weight(weight, is_gated=is_gated):
        most_rows = 0
    if not (takes_one or most_rows):
        return None
    return FewRowsLinear(weight, activation, takes_one=takes_one, most_rows=most_rows)


def most_rows_of(table: tuple[tuple[int, int], ...], weight: torch.Tensor) -> int:
    """The most rows for which Triton's tiles are taken for ``weight`` (out, in): by ``table``, or as the user asks
    (``env.few_rows_by``)."""
    from tp_engine.kernels.linear.few_rows_linear_triton import max_rows

    by, most_rows = few_rows_by(), max_rows(weight.dtype)
    if by == "library":
        return 0
    if by == "triton":
        return most_rows
    return min(most_rows, next(rows for elements, rows in table if weight.numel() <= elements))


@dataclass(frozen=True, slots=True, eq=False)
class PartToAdd:
    """A part of a block's output (N, out) that is not yet computed: its product adds it to the residual stream."""

    x: torch.Tensor
    bias: torch.Tensor | None
    product: FewRowsLinear

    def add_to(self, stream: torch.Tensor, scale: float) -> None:
        """Add it to ``stream`` (N, out) in place, ``scale`` times."""
        self.product(self.x, self.bias, stream, scale)


BlockPart: TypeAlias = torch.Tensor | PartToAdd
"""This rank's part of a block's output, (N, hidden)."""


def part_to_add(product: Product, x: Rows, bias: torch.Tensor | None) -> PartToAdd | None:
    """The part that ``product`` would make of ``x`` (N, in), if it can add that many rows."""
    if not (isinstance(product, FewRowsLinear) and isinstance(x, torch.Tensor) and product.fuses(len(x))):
        return None
    return PartToAdd(x, bias, product)


class NormInReaders:
    """Whether all products that read a norm can normalise the rows themselves."""

    def __init__(self, products: Sequence[Product], rule: NormRule) -> None:
        self._products = [one for one in products if isinstance(one, FewRowsLinear)]
        self._is_possible = len(self._products) == len(products) > 0 and not rule.is_centred

    def __call__(self, num_rows: int) -> bool:
        """For so many rows."""
        return self._is_possible and all(one.norms(num_rows) for one in self._products)
