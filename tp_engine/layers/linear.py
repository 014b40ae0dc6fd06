"""Linear layers, split over the ranks (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

::

    column parallel            row parallel
    W (out, in), W = [W0]      W = [W0 | W1]       rank r holds Wr
                     [W1]
    y = [x W0' | x W1']        y = x0 W0' + x1 W1'
    every rank has all of x    every rank has its columns of x; all-reduce
    and gets its columns of y  gives every rank all of y

A column-parallel layer followed by a row-parallel one needs a single all-reduce.  Each layer says which rows and
columns of which stored modules it holds; its format (``quantization/``) decides how they lie in memory.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.lora import LinearAdapters, rows_of_step
from tp_engine.layers.quantization.base import GatedProduct, LinearFormat, Product, TunedFormat
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.mlp import Activation
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.weights.source import Decode, Span, as_stored, equal_share, kv_head_share, times


class LocalLinear(Layer):
    """This rank's part of a linear layer, in ``format`` or else the context's, with a ``bias`` (out,) or None."""

    def __init__(
        self, shape: LinearShape, *, bias: bool, context: LayerContext, format: LinearFormat | None = None
    ) -> None:
        super().__init__()
        self.adapters = None if context.adapters is None else LinearAdapters(shape, context)
        self.shape, self._dtype, self._gate = shape, context.dtype, context.op("gate")
        self.format = context.format_of([part.name for part in shape.parts]) if format is None else format
        for name, parameter in self.format.create(context, shape).items():
            self.register_parameter(name, parameter)
        self.bias = context.parameter((shape.num_rows,), shape.vector_sources(".bias")) if bias else None
        self._product: Product | None = None

    @property
    def loaded(self) -> Product:
        """The product of the loaded weights."""
        assert self._product is not None, "finish_loading comes first"
        return self._product

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        if not isinstance(self.format, TunedFormat):
            return ()
        weights = {name: weight for name, weight in self.named_parameters(recurse=False) if name != "bias"}
        found = self.format.tuned(weights, self.shape, self._dtype, device_type)
        return () if found is None else (found,)

    def finish_loading(self) -> None:
        """Make the product of the loaded weights, then drop the parameters."""
        assert self._product is None, "finish_loading was called twice"
        weights = {name: weight for name, weight in self.named_parameters(recurse=False) if name != "bias"}
        self._product = self.format.finish(weights, self.shape, self._dtype)
        assert self.shape.activation is None or isinstance(self._product, GatedProduct), "see LinearFormat"
        self.is_recordable = self._product.is_recordable
        for name in weights:
            delattr(self, name)

    def product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in), codes only if the product reads them (``wanted_codes``) -> (N, out)."""
        if self.adapters is None or (rows := rows_of_step(len(x))) is None:
            return self.loaded(cast("torch.Tensor", x), bias)
        assert isinstance(x, torch.Tensor), "a step with adapters has rows, not codes"
        if (activation := self.shape.activation) is None:
            return self.adapters.add(self.loaded(x, bias), x, rows)
        before = cast("GatedProduct", self.loaded).before_activation(x, bias)
        gated: torch.Tensor = self._gate(self.adapters.add(before, x, rows), activation)
        return gated

    def forward(self, x: Rows) -> torch.Tensor:
        return self.product(x, self.bias)


class GatedColumnParallelLinear(LocalLinear):
    """``activation(gate(x), up(x))``, or without a gate ``activation(up(x))``: (N, in) -> (N, size / world size); a
    rank holds its share of each.

    ::

        rank 0: [gate 0 | up 0]    rank 1: [gate 1 | up 1]

    ``fused_name``: the one stored module that holds all gate rows, then all up rows.
    """

    def __init__(
        self,
        in_size: int,
        size: int,
        activation: Activation,
        *,
        bias: bool,
        context: LayerContext,
        fused_name: str | None = None,
    ) -> None:
        own = equal_share(size, context.rank, context.world_size)
        names = ("gate_proj", "up_proj")[-activation.num_parts :]
        parts = _parts(context, fused_name, [(name, size, own, as_stored) for name in names])
        shape = LinearShape(stored_columns=in_size, columns=Span(0, in_size), parts=parts, activation=activation)
        super().__init__(shape, bias=bias, context=context.at(fused_name or names[0]))


class QKVParallelLinear(LocalLinear):
    """Query, key and value projections as one product: (N, hidden) -> (N, (heads + 2 KV heads) * head_dim [+ gates]).

    Gates of heads come after the values.  Where there are fewer KV heads
    than ranks, each KV head is held by several ranks::

        8 query heads, 2 KV heads, 4 ranks:   rank 0 [q0 q1 k0 v0]   rank 1 [q2 q3 k0 v0]   rank 2 [q4 q5 k1 v1] ...

    ``num_heads`` and ``num_kv_heads`` are this rank's.  ``order`` is that of the rows of query and key heads.  Where
    the key projection makes the values too, its rows are here twice, because values are not rotated.  A layer that
    reads another's keys and values has only rows of queries.
    """

    def __init__(self, hidden_size: int, spec: AttentionSpec, order: Decode, *, context: LayerContext) -> None:
        heads = equal_share(spec.num_heads, context.rank, context.world_size)
        kv_heads = kv_head_share(spec.num_kv_heads, context.rank, context.world_size)
        dim = spec.head_dim
        sizes = [(spec.num_heads * dim, times(heads, dim)), *[(spec.num_kv_heads * dim, times(kv_heads, dim))] * 2]
        modules = zip(spec.projections, sizes, (order, order, as_stored), strict=False)
        parts = _parts(context, spec.fused_name, [(name, *size, own) for name, size, own in modules])
        if spec.gate is not None and spec.gate.name is not None:
            size = spec.num_heads * spec.gate_dim
            parts += _parts(context, None, [(spec.gate.name, size, times(heads, spec.gate_dim), as_stored)])
        elif spec.gate is not None:
            query = replace(parts[0], stored_rows=2 * spec.num_heads * dim, step=2 * dim, count=dim)
            parts = (query, *parts[1:], replace(query, first=dim, order=as_stored))
        shape = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
        super().__init__(shape, bias=spec.qkv_bias, context=context.at(spec.fused_name or "q_proj"))
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size


class RowParallelLinear(LocalLinear):
    """(N, in / world size) -> (N, out), summed over the ranks; only rank 0 adds the bias.

    ``part`` leaves the sum to where the block's output joins the residual stream, except with ``tp_invariant``.
    """

    def __init__(self, in_size: int, out_size: int, *, bias: bool, context: LayerContext) -> None:
        columns = equal_share(in_size, context.rank, context.world_size)
        part = Part(name=context.path, stored_rows=out_size, rows=Span(0, out_size), room=out_size)
        super().__init__(
            LinearShape(stored_columns=in_size, columns=columns, parts=(part,), num_shards=context.num_shards),
            bias=bias,
            context=context,
        )
        self._context = context
        self._adds_bias = bias and context.communicator.info.is_first

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias, where this rank adds it."""
        return self.bias if self._adds_bias else None

    def forward(self, x: Rows) -> torch.Tensor:
        return self._context.joins.all_reduce(self._context.output(self.product(x, self.own_bias)))

    def part(self, x: Rows) -> torch.Tensor:
        """This rank's part (N, out) of the layer's output, for ``LayerContext.joins``."""
        return self._context.output(self.product(x, self.own_bias))


def whole_linear(name: str, in_size: int, out_size: int, context: LayerContext) -> LocalLinear:
    """A linear layer that every rank has whole, and no adapter changes."""
    own = context.at(name).unadapted
    part = Part(name=own.path, stored_rows=out_size, rows=Span(0, out_size), room=out_size)
    shape = LinearShape(stored_columns=in_size, columns=Span(0, in_size), parts=(part,))
    return LocalLinear(shape, bias=False, context=own)


def _parts(
    context: LayerContext, fused_name: str | None, modules: list[tuple[str, int, Span, Decode]]
) -> tuple[Part, ...]:
    """The parts of ``modules`` (name, rows, own rows, their order), stored below ``context`` one by one or fused."""
    if fused_name is None:
        return tuple(
            Part(name=context.at(name).path, stored_rows=size, rows=own, room=own.size, order=order)
            for name, size, own, order in modules
        )
    total, first, parts = sum(size for _, size, _, _ in modules), 0, []
    for _, size, own, order in modules:
        rows = Span(first + own.start, own.size)
        parts.append(Part(name=context.at(fused_name).path, stored_rows=total, rows=rows, room=own.size, order=order))
        first += size
    return tuple(parts)
