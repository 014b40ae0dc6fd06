"""Quantised weights whose columns are in groups by their activations, not by their places (``desc_act``, ``actorder``).

::

    order      int32 (parts, in)      the group of each column of this rank, as each part's module has it
    scales, zeros                     (out, groups) of all groups, on every rank
    codes                             as in ``quantised.py``, columns in their own order

Once loaded, columns are sorted by their groups, and the product sorts its inputs alike, so that it is the usual one of
groups of equal size.  A rank that has only some of the columns has a few of each group: its groups are then of
``unit`` columns, and the last of each is filled up with columns that read zeros.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.errors import ConfigError
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.layers.quantization.base import ExpertsProduct, GatedProduct, ParameterFactory, Product
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.packings import pack_codes, unpack_codes
from tp_engine.layers.quantization.quantised import Quantised, WeightLayout
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.weights.source import Source, Span

_LEAST_UNIT = 8
_SCALE_BYTES = 3  # of a group in a row, with its zero point


class Ordered(Quantised):
    """Weights of one scheme with ``order_name``."""

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        codes = self._create_codes(context, [WeightLayout(shape)])
        every_column = replace(shape, columns=Span(0, shape.stored_columns), room=None)
        kind = pack_codes(self.scheme.kind, shape.num_columns)[0]
        numbers = self._create_numbers(context, [WeightLayout(every_column)], (), kind)
        order = context.parameter((len(shape.parts), shape.columns.size), self._orders(shape), dtype=torch.int32)
        return {"codes": codes, **numbers, "order": order}

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        order, scales = parameters["order"], parameters["scales"]
        if not all(torch.equal(one, order[0]) for one in order):
            names = ", ".join(part.name for part in shape.parts)
            raise ConfigError(
                f"the columns of {names} are in groups of different orders, and they are parts of one product: use a "
                "checkpoint without desc_act (actorder)"
            )
        kind = pack_codes(self.scheme.kind, shape.num_columns)[0]
        group = self.scheme.group or shape.stored_columns
        found = sort_columns(order[0].long(), group, self.scheme.bits)
        codes = F.pad(unpack_codes(kind, parameters["codes"]), (0, 1))[:, found.columns]
        # An odd number of codes of 4 bits is kept in 8 bits, and stays so.
        kept, _, pack = pack_codes(kind if kind == "int8" else self.scheme.kind, len(found.columns))
        zeros = parameters.get("zeros")
        weight = QuantisedWeight(
            kind=kept,
            codes=pack(codes),
            scales=scales[:, found.groups],
            group=found.unit,
            zeros=None if zeros is None else zeros[:, found.groups],
        )
        product = choose_quantised_product(
            weight, dtype=dtype, activation=shape.activation, quantises_activations=False
        )
        return product if found.is_sorted else SortedProduct(product, found.columns, shape.columns.size)

    def create_experts(self, context: ParameterFactory, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        raise ConfigError(
            f"{shape.path} has experts whose columns are in groups by their activations (desc_act, actorder), which is "
            "read of other layers only: use a checkpoint without it"
        )

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        raise AssertionError("create_experts refuses them")

    def _orders(self, shape: LinearShape) -> tuple[Source, ...]:
        return tuple(
            Source(
                name=f"{part.name}.{self.scheme.order_name}",
                shape=(shape.stored_columns,),
                taken=(shape.columns,),
                target=(Span(place, 1), Span(0, shape.columns.size)),
                decode=lambda values: values.unsqueeze(0),
                dtype=torch.int32,
                init=0,
            )
            for place, part in enumerate(shape.parts)
        )


class SortedColumns(NamedTuple):
    """Columns by their groups: ``columns`` has the one at each place, or one behind the last; the places of a ``unit``
    are of one group, and ``groups`` names it."""

    columns: torch.Tensor
    groups: torch.Tensor
    unit: int

    @property
    def is_sorted(self) -> bool:
        """Whether each column is at its own place."""
        return torch.equal(self.columns, torch.arange(len(self.columns), device=self.columns.device))


def sort_columns(order: torch.Tensor, group: int, bits: int) -> SortedColumns:
    """Sort columns by ``order``, their groups, of up to ``group`` columns; those of a group keep their order.

    Of the sizes of a unit, that with the least memory for codes of ``bits`` and their scales is taken.
    """
    counts = torch.bincount(order)
    units = [
        group // parts for parts in range(1, group + 1) if group % (2 * parts) == 0 and group // parts >= _LEAST_UNIT
    ]

    def places(unit: int) -> torch.Tensor:
        return (counts + unit - 1) // unit * unit

    def num_bytes(unit: int) -> float:
        return float(places(unit).sum()) * (bits / 8 + _SCALE_BYTES / unit)

    unit = min(units or [group], key=num_bytes)
    sizes = places(unit)
    first_places, first_columns = sizes.cumsum(0) - sizes, counts.cumsum(0) - counts
    by_group = order.argsort(stable=True)
    groups = order[by_group]
    index = order.new_full((int(sizes.sum()),), len(order))
    index[first_places[groups] + torch.arange(len(order), device=order.device) - first_columns[groups]] = by_group
    names = torch.arange(len(counts), device=order.device)
    return SortedColumns(index, names.repeat_interleave(sizes // unit), unit)


class SortedProduct:
    """``product`` of sorted columns: column ``index[i]`` of the input comes i-th; behind the last there are zeros."""

    def __init__(self, product: Product, index: torch.Tensor, num_columns: int) -> None:
        self._product, self._index = product, index
        self._has_gaps = bool((index == num_columns).any())
        self.is_recordable = product.is_recordable and index.is_cuda

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(self._sorted(x), bias)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what the activation takes."""
        assert isinstance(self._product, GatedProduct)
        return self._product.before_activation(self._sorted(x), bias)

    def _sorted(self, x: torch.Tensor) -> torch.Tensor:
        return (F.pad(x, (0, 1)) if self._has_gaps else x).index_select(1, self._index)
