"""Quantised weights whose columns are grouped by their activations, not by position (``desc_act``, ``actorder``).

::

    order      int32 (parts, in)      the group of each column of this rank, as each part's module has it
    scales, zeros                     (out, groups) of all groups, on every rank
    codes                             as in ``quantised.py``, columns in their own order

Once loaded, columns are sorted by their groups, and the product sorts its inputs alike, so it is the usual one with
groups of equal size.  A rank that has only some of the columns has a few of each group: its groups then have ``unit``
columns, and the last of each is padded with columns that read zeros.  Experts, whose tensors have one more dimension in
front, have an order each, so they are multiplied one after the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.errors import ConfigError
from tp_engine.kernels.experts.experts import add_up
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.layers.quantization.base import ExpertsProduct, GatedProduct, ParameterFactory, Product
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.packings import pack_codes, unpack_codes
from tp_engine.layers.quantization.quantised import Quantised, WeightLayout, expert_sides
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.weights.source import Source, Span

_LEAST_UNIT = 8
_SCALE_BYTES = 3  # of a group of a row, with its zero point


class Ordered(Quantised):
    """Weights of one scheme with ``order_name``."""

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        return self._create_side(context, [WeightLayout(shape)])

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        kind = pack_codes(self.scheme.kind, shape.num_columns)[0]
        order = _common_order(parameters["order"], shape)
        found = sort_columns(order, self.scheme.group or shape.stored_columns, self.scheme.bits)
        columns = found.columns.masked_fill(found.columns == len(order), shape.num_columns)
        # An odd number of codes of 4 bits is kept in 8 bits, and stays so.
        kept, _, pack = pack_codes(kind if kind == "int8" else self.scheme.kind, len(columns))
        zeros = parameters.get("zeros")
        weight = QuantisedWeight(
            kind=kept,
            codes=pack(F.pad(unpack_codes(kind, parameters["codes"]), (0, 1))[:, columns]),
            scales=parameters["scales"][:, found.groups],
            group=found.unit,
            zeros=None if zeros is None else zeros[:, found.groups],
        )
        product = choose_quantised_product(
            weight, dtype=dtype, activation=shape.activation, quantises_activations=False, choices=self.choices
        )
        is_as_it_is = found.is_sorted and len(columns) == shape.num_columns
        return product if is_as_it_is else SortedProduct(product, columns, shape.num_columns)

    def create_experts(self, context: ParameterFactory, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        if shape.spec.bias:
            raise ConfigError(
                f"{shape.path} has experts with biases, whose columns are in groups by their activations (desc_act, "
                "actorder), which is not read: use a checkpoint without it"
            )
        found: dict[str, nn.Parameter] = {}
        for side, ways in expert_sides(shape).items():
            made = self._create_side(context, ways, (shape.experts.size,))
            found |= {f"{side}_{name}": parameter for name, parameter in made.items()}
        return found

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        ways = {side: ways[0].shape for side, ways in expert_sides(shape).items()}
        ways["gate_up"] = replace(ways["gate_up"], activation=shape.spec.activation)

        def products(side: str) -> list[Product]:
            own = {name.removeprefix(f"{side}_"): one for name, one in parameters.items() if name.startswith(side)}
            count = range(shape.experts.size)
            return [self.finish({name: one[at] for name, one in own.items()}, ways[side], dtype) for at in count]

        return SeparateProducts(products("gate_up"), products("down"), first=shape.experts.start)

    def _create_side(
        self, context: ParameterFactory, ways: Sequence[WeightLayout], stack: tuple[int, ...] = ()
    ) -> dict[str, nn.Parameter]:
        shape = ways[0].shape
        kind = pack_codes(self.scheme.kind, shape.num_columns)[0]
        whole = [
            way._replace(shape=replace(way.shape, columns=Span(0, shape.stored_columns), room=None)) for way in ways
        ]
        size = (*stack, len(shape.parts), shape.columns.size)
        orders = (way.of_all(self._orders(way.shape)) for way in ways)
        return {
            "codes": self._create_codes(context, ways, stack),
            **self._create_numbers(context, whole, stack, kind),
            "order": context.parameter(size, *orders, dtype=torch.int32),
        }

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


def _common_order(orders: torch.Tensor, shape: LinearShape) -> torch.Tensor:
    """The order of all parts (parts, in), which have one input."""
    if not all(torch.equal(one, orders[0]) for one in orders):
        names = ", ".join(part.name for part in shape.parts)
        raise ConfigError(
            f"the columns of {names} are in groups of different orders, and they are parts of one product: use a "
            "checkpoint without desc_act (actorder)"
        )
    return orders[0].long()


class SeparateProducts:
    """Experts with a product each, one expert after the other, because each sorts its inputs in its own way."""

    is_recordable = False

    def __init__(self, gate_up: Sequence[Product], down: Sequence[Product], *, first: int) -> None:
        self._experts, self._first = list(zip(gate_up, down, strict=True)), first

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        local_ids = expert_ids - self._first
        outputs = x.new_zeros((*local_ids.shape, x.shape[1]))
        for index, (gate_up, down) in enumerate(self._experts):
            tokens, places = (local_ids == index).nonzero(as_tuple=True)
            if len(tokens):
                outputs[tokens, places] = down(gate_up(x[tokens], None), None)
        return add_up(outputs, weights).to(x.dtype)


class SortedColumns(NamedTuple):
    """Columns sorted by group: ``columns`` has the one for each place, or for padding the number of columns; each
    ``unit`` places belong to one group, which ``groups`` names."""

    columns: torch.Tensor
    groups: torch.Tensor
    unit: int

    @property
    def is_sorted(self) -> bool:
        """Whether each column is at its own place, without padding."""
        return torch.equal(self.columns, torch.arange(len(self.columns), device=self.columns.device, dtype=torch.int64))


def sort_columns(order: torch.Tensor, group: int, bits: int) -> SortedColumns:
    """Sort columns by ``order``, their groups, of up to ``group`` columns; those of a group keep their order.

    The unit is the one that takes the least memory for codes of ``bits`` and their scales.
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
    index[
        first_places[groups] + torch.arange(len(order), device=order.device, dtype=torch.int64) - first_columns[groups]
    ] = by_group
    names = torch.arange(len(counts), device=order.device, dtype=torch.int64)
    return SortedColumns(index, names.repeat_interleave(sizes // unit), unit)


class SortedProduct:
    """``product`` of sorted columns: its input is ``columns`` of ``x``, where column ``num_columns`` reads zeros."""

    def __init__(self, product: Product, columns: torch.Tensor, num_columns: int) -> None:
        self._product, self._columns = product, columns
        self._has_gaps = bool((columns == num_columns).any())
        self.is_recordable = product.is_recordable and columns.is_cuda

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(self._sorted(x), bias)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product without its activation."""
        assert isinstance(self._product, GatedProduct)
        return self._product.before_activation(self._sorted(x), bias)

    def _sorted(self, x: torch.Tensor) -> torch.Tensor:
        return (F.pad(x, (0, 1)) if self._has_gaps else x).index_select(1, self._columns)
