"""Which values of stored modules a linear layer takes: rows and columns of this rank, of weights in any packing.

::

    weight (rows, columns)        tensor: each element holds or covers rows x columns of the weight

    +----+----+----+----+         taken     the elements that this rank's rows and columns touch
    |    | ########|##  |         unpacked  values apart, scales repeated down to `unit`
    +----+----+----+----+         cut       to this rank's rows and columns
    |    | ########|##  |         packed    as the parameter keeps them
    +----+----+----+----+

A shard may begin or end inside of a scale's block, or of a word with several values: it takes the whole element, and
cuts it afterwards.
"""

import math
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Literal, NamedTuple, TypeVar

import torch

from tp_engine.errors import WeightError
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div
from tp_engine.weights.source import Decode, Source, Span, as_stored, whole


class Unit(NamedTuple):
    """Rows and columns of a weight that an element of a parameter stands for."""

    rows: int
    columns: int


_T = TypeVar("_T")
ONE = Unit(1, 1)
_SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))  # all are found on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a stored module, named by its ``suffix``; an element covers a ``unit`` of the weight.

    It is (rows, columns), or (columns, rows) if ``is_transposed``; each element is ``tail`` numbers.  ``unpack`` takes
    it rows first, and returns (rows, columns), one value for each ``unpacked`` of the weight.  ``dtype`` is the type on
    disk, None for any float.  ``form``: a ``matrix``; one with a dimension of 1 after each of its two (``singles``); or
    rows alone (``vector``).
    """

    suffix: str
    unit: Unit = ONE
    unpacked: Unit = ONE
    unpack: Decode = as_stored
    is_transposed: bool = False
    tail: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    init: float | None = None
    form: Literal["matrix", "singles", "vector"] = "matrix"

    def shaped(self, rows: _T, columns: _T, single: _T) -> tuple[_T, ...]:
        """What describes each dimension on disk, given what describes rows, columns and a dimension of 1."""
        shapes = {"matrix": (rows, columns), "singles": (rows, single, columns, single), "vector": (rows,)}
        return shapes[self.form]


WEIGHT = StoredTensor(suffix=".weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a product that come from one stored module: ``rows`` of the ``stored_rows`` of module ``name``.

    They fill the first of ``room`` rows; the rest are zero.  ``order`` decodes them.  With a ``step`` above 1, the
    module's rows are those of several parts in turn, and this part's are ``count`` of every ``step`` of them, from
    ``first`` on; ``rows`` are then counted among this part's.
    """

    name: str
    stored_rows: int
    rows: Span
    room: int
    order: Decode = as_stored
    first: int = 0
    step: int = 1
    count: int = 1

    @property
    def taken(self) -> Span:
        """The stored rows to read."""
        turns, _ = cover(self.rows, self.count)
        return Span(turns.start * self.step, turns.size * self.step)

    def decode(self, values: torch.Tensor, unit: int = 1) -> torch.Tensor:
        """The rows of this part, from the rows that were read; a value covers ``unit`` rows, and none is cut."""
        if self.step == 1:
            return self.order(values)
        step, first, count, size = (one // unit for one in (self.step, self.first, self.count, self.rows.size))
        skipped = cover(self.rows, self.count)[1] // unit
        turns = values.reshape(-1, step, *values.shape[1:])[:, first : first + count]
        return self.order(turns.flatten(0, 1)[skipped : skipped + size])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One product on this rank: its ``parts``, one above the other, and ``columns`` of their ``stored_columns``.

    There is room for ``room`` columns, by default for exactly those; the rest are zero.  With an ``activation``, the
    parts are gate and up, or up alone, and the product ends with the activation.  With ``num_shards`` the product is
    ``tree_sum.tree_linear``, which keeps its sums unless it has all columns.  Only a product that ``rounds_rows`` may
    round them as the checkpoint's makers did.
    """

    stored_columns: int
    columns: Span
    parts: tuple[Part, ...]
    activation: Activation | None = None
    room: int | None = None
    num_shards: int = 0
    rounds_rows: bool = True

    @property
    def keeps_sums(self) -> bool:
        """Whether the product is float32, because other ranks' parts are added to it."""
        return self.num_shards > 0 and self.columns.size < self.stored_columns

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.room for part in self.parts)

    @property
    def num_columns(self) -> int:
        """Columns that have memory here."""
        return self.columns.size if self.room is None else self.room

    def placed_parts(self) -> list[tuple[Part, int]]:
        """Each part, and its first row in the product."""
        found, first = [], 0
        for part in self.parts:
            found.append((part, first))
            first += part.room
        return found

    def refine(self, block: Unit) -> Unit:
        """The largest unit that divides ``block`` and has boundaries where this rank's rows, parts and columns begin.
        Scales of blocks that a shard cuts are repeated for each unit, which changes no value.
        """
        rows = block.rows
        for part, first in self.placed_parts():
            turns = (part.step, part.first, part.count) if part.step > 1 else ()
            rows = gcd(rows, part.rows.start, first, part.room, *turns) if part.order is as_stored else 1
        start, end = self.columns.start, self.columns.start + self.columns.size
        return Unit(rows, gcd(block.columns, start, 0 if end == self.stored_columns else end))

    def sources(self, tensor: StoredTensor = WEIGHT, unit: Unit = ONE, pack: Decode = as_stored) -> tuple[Source, ...]:
        """The sources of a parameter (rows, columns) in ``unit``; ``pack`` joins the values of one element."""
        return tuple(self._source(part, first, tensor, unit, pack) for part, first in self.placed_parts())

    def _source(self, part: Part, first: int, tensor: StoredTensor, unit: Unit, pack: Decode) -> Source:
        spans, cuts, repeats = [], [], []
        steps = [min(unpacked, wanted) for unpacked, wanted in zip(tensor.unpacked, unit, strict=True)]
        for span, held, unpacked, step in zip(
            (part.taken, self.columns), tensor.unit, tensor.unpacked, steps, strict=True
        ):
            covered, skipped = cover(span, held)
            spans.append(covered)
            cuts.append((skipped // step, ceil_div(span.size, step)))
            repeats.append(unpacked // step)

        def decode(values: torch.Tensor) -> torch.Tensor:
            matrix = values if tensor.form == "matrix" else values.reshape(len(values), -1)
            found = tensor.unpack(matrix.transpose(0, 1) if tensor.is_transposed else matrix)
            for dim in (0, 1):
                found = found.repeat_interleave(repeats[dim], dim) if repeats[dim] > 1 else found
                found = found.narrow(dim, *cuts[dim])
            return pack(part.decode(found, steps[0]))

        sizes = [ceil_div(part.stored_rows, tensor.unit.rows), ceil_div(self.stored_columns, tensor.unit.columns)]
        if tensor.is_transposed:
            spans.reverse()
            sizes.reverse()
        counts = ceil_div(part.rows.size, unit.rows), ceil_div(self.columns.size, unit.columns)
        return Source(
            name=part.name + tensor.suffix,
            shape=(*tensor.shaped(sizes[0], sizes[1], 1), *tensor.tail),
            taken=(*tensor.shaped(spans[0], spans[1], Span(0, 1)), *whole(tensor.tail)),
            target=(Span(first // unit.rows, counts[0]), Span(0, counts[1])),
            decode=part.decode if tensor == WEIGHT else decode,
            dtype=tensor.dtype,
            init=tensor.init,
        )

    def vector_sources(self, suffix: str) -> tuple[Source, ...]:
        """The sources of a parameter (rows,), from tensors with one value for each row: biases."""
        return tuple(
            Source(
                name=part.name + suffix,
                shape=(part.stored_rows,),
                taken=(part.taken,),
                target=(Span(first, part.rows.size),),
                decode=part.decode,
            )
            for part, first in self.placed_parts()
        )

    def scalar_sources(
        self, suffix: str, decode: Decode, init: float, divides: bool = False
    ) -> list[tuple[Source, ...]]:
        """The alternative sources of a parameter (rows, 1): tensors with one value for a whole module, of shape (),
        (1,) or (1, 1), or with one for each of the module's parts, of shape (parts,) or (parts, 1).  What ``divides``
        is refused with ``WeightError`` unless it is above 0 and finite."""
        names = [part.name for part in self.parts]

        def alternative(shape: tuple[int, ...], is_joint: bool) -> tuple[Source, ...]:
            found = []
            for index, (part, first) in enumerate(self.placed_parts()):
                number, total = names[:index].count(part.name), names.count(part.name)
                stored = shape if is_joint or total == 1 else (total, *shape[1:])
                taken = whole(shape) if stored == shape else (Span(number, 1), *whole(shape[1:]))
                target = (Span(first, part.rows.size), Span(0, 1))
                name = part.name + suffix
                spread = partial(_spread, decode=decode, count=part.rows.size, divides=divides)
                found.append(Source(name=name, shape=stored, taken=taken, target=target, decode=spread, init=init))
            return tuple(found)

        return [alternative(shape, is_joint) for shape in _SCALAR_SHAPES for is_joint in (True, False)]


def _spread(value: torch.Tensor, decode: Decode, count: int, divides: bool) -> torch.Tensor:
    """A number for ``count`` rows (count, 1), which must be above 0 if it ``divides``."""
    number = decode(value.float())
    if divides and not 0 < number.item() < math.inf:
        raise WeightError(
            f"is {value.item()}: inputs are divided by this scale, so it must be above 0 and finite; "
            "the checkpoint is damaged, or its calibration never reached this module"
        )
    return number.reshape(1, 1).expand(count, 1)


def cover(span: Span, unit: int) -> tuple[Span, int]:
    """The elements of size ``unit`` that ``span`` touches, and how far into the first one it begins."""
    first = span.start // unit
    end = ceil_div(span.start + span.size, unit) if span.size else first
    return Span(first, end - first), span.start - first * unit
