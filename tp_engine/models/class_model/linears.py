"""Linear layers of a transformers class, one by one: split by the class's plan, or their rows divided and gathered.

::

    colwise                this rank's rows; KV heads repeat where there are fewer than ranks
    packed_colwise         the same of two parts, one after the other
    rowwise                this rank's columns, and the sum over the ranks
    rowwise_split_input    the same, of its part of an input that is whole
    replicate...           whole
    anything else, none    this rank's rows, gathered: right for any layer, at the price of a collective
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.class_model.stored import Piece
from tp_engine.weights.source import Span, equal_share, kv_head_share, times


@dataclass(frozen=True, slots=True)
class Plan:
    """The styles of a class's linear layers, by patterns of their names; ``attention`` is that of the modules with
    attention."""

    styles: Mapping[str, str]
    attention: Mapping[str, AttentionSpec]

    def style_of(self, path: str) -> str:
        """Return that of the linear layer ``path``; "" without one."""
        return next((style for pattern, style in self.styles.items() if _matches(pattern, path)), "")

    def kv_heads_of(self, path: str, num_rows: int) -> int | None:
        """Return how many KV heads the rows of the linear layer ``path`` are; None if they are something else."""
        own = self.attention.get(path.rpartition(".")[0])
        if own is None or own.num_kv_heads == own.num_heads:
            return None
        dims = {own.head_dim, own.value_dim}
        return own.num_kv_heads if any(num_rows == own.num_kv_heads * dim for dim in dims) else None


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a linear layer in a checkpoint: from ``first`` on, of the ``num_rows`` of the module ``name``."""

    name: str
    first: int
    num_rows: int


def stored_rows(pieces: Sequence[Piece], linear: nn.Linear) -> StoredRows | None:
    """Return where those of ``linear`` are, whose weight has these ``pieces``; None if they are in several tensors, or
    exchanged with its columns."""
    one = pieces[0]
    sizes = tuple(span.size for span in one.taken)
    if len(pieces) != 1 or one.is_transposed or sizes != tuple(linear.weight.shape) or one.shape[1] != sizes[1]:
        return None
    if not one.name.endswith(".weight"):
        return None
    return StoredRows(one.name.removesuffix(".weight"), one.taken[0].start, one.shape[0])


class ClassLinear(LocalLinear):
    """In the place of a class's ``linear``, which is at ``path`` of the class, and ``stored`` in a checkpoint."""

    def __init__(self, linear: nn.Linear, path: str, stored: StoredRows, plan: Plan, context: LayerContext) -> None:
        cut = _cut(linear, path, plan, context)
        parts = tuple(
            Part(
                name=stored.name,
                stored_rows=stored.num_rows,
                rows=Span(stored.first + rows.start, rows.size),
                room=rows.size,
            )
            for rows in cut.rows
        )
        shape = LinearShape(stored_columns=linear.in_features, columns=cut.columns, parts=parts)
        super().__init__(shape, bias=linear.bias is not None, context=context.at(stored.name))
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._communicator, self._then = context.communicator, cut.then
        self._own_columns = cut.columns if cut.splits_input else None
        self._adds_bias = cut.then != "summed" or context.communicator.info.is_first

    def forward(self, x: Rows) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        assert isinstance(x, torch.Tensor), "a class has no codes"
        if (own := self._own_columns) is not None:
            x = x[..., own.start : own.start + own.size]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = self.product(rows, self.bias if self._adds_bias else None)
        if self._then == "gathered":
            out = self._communicator.all_gather(out)
        elif self._then == "summed":
            out = self._communicator.all_reduce(out)
        return out.view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's part of a linear layer: ``rows`` one above the other, and ``columns``; ``then`` its outputs are gathered
    or summed.  It ``splits_input`` if it takes its columns of inputs that are whole."""

    rows: list[Span]
    columns: Span
    then: Literal["", "gathered", "summed"] = ""
    splits_input: bool = False


def _cut(linear: nn.Linear, path: str, plan: Plan, context: LayerContext) -> _Cut:
    rows, columns, ranks = linear.out_features, linear.in_features, context.world_size
    all_rows, all_columns = Span(0, rows), Span(0, columns)
    style = plan.style_of(path) if ranks > 1 else "replicate"
    if style.startswith("rowwise") and columns % ranks == 0:
        own = equal_share(columns, context.rank, ranks)
        return _Cut([all_rows], own, "summed", splits_input=style != "rowwise")
    if style == "packed_colwise" and rows % (2 * ranks) == 0:
        half = equal_share(rows // 2, context.rank, ranks)
        return _Cut([half, Span(rows // 2 + half.start, half.size)], all_columns)
    if style == "colwise" and (heads := plan.kv_heads_of(path, rows)) is not None:
        return _Cut([times(kv_head_share(heads, context.rank, ranks), rows // heads)], all_columns)
    if style.startswith("replicate") or rows % ranks:
        return _Cut([all_rows], all_columns)
    return _Cut([equal_share(rows, context.rank, ranks)], all_columns, "" if style == "colwise" else "gathered")


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None
