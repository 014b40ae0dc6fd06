"""Experts under tensor parallelism: a router, which every rank has whole, and this rank's part of the experts.

::

    split (the default)      rank r has its part of each expert's inner size, as of a dense MLP
    expert parallelism       rank r has some experts, whole; pairs of other experts add nothing here

Either way each rank makes a part of the block's output, and the all-reduce at the end of the block adds the parts up.
All ranks route alike, because all start from the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from tp_engine.kernels.routing import ExpertLoad
from tp_engine.layers.attention import current_metadata
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.formats.base import ExpertsProduct
from tp_engine.layers.formats.dense import Dense
from tp_engine.layers.formats.experts import share_experts
from tp_engine.layers.formats.stored import LinearShape, Part
from tp_engine.layers.linear import LocalLinear
from tp_engine.model_config.mlp import ExpertsSpec
from tp_engine.weights.source import Source, Span, whole


class Router(Layer):
    """Logits of all experts, and of the shared MLP's gate if there is one: one product, the same on all ranks."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self._widens = spec.routes_in_float32 and context.dtype is not torch.float32
        own = replace(context, dtype=torch.float32) if self._widens else context
        modules = [(spec.router, spec.num_experts), *([(spec.shared_gate, 1)] if spec.shared_gate else [])]
        parts = tuple(
            Part(name=context.at(name).path, stored_rows=rows, rows=Span(0, rows), room=rows) for name, rows in modules
        )
        shape = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
        self.linear = LocalLinear(shape, bias=spec.router_bias, context=own.at(spec.router), format=Dense())
        self._to_float32 = context.op("to_float32")
        self.is_recordable = context.can_record("to_float32")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden) -> (N, experts [+ 1]), in the type of ``x`` or float32."""
        logits: torch.Tensor = self.linear(self._to_float32(x) if self._widens else x)
        return logits


class Experts(Layer):
    """The experts of a layer that are on this rank, in their format, and the routing to them.

    ``token_counts`` (experts,) int64 counts the tokens that went to each expert.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self._format, self._dtype = context.format_of(_expert_names(spec, context)), context.dtype
        self.shape = share_experts(
            spec,
            hidden_size,
            context.path,
            rank=context.rank,
            world_size=context.world_size,
            splits=context.splits_experts,
            block=self._format.experts_block,
        )
        for name, parameter in self._format.create_experts(context, self.shape).items():
            self.register_parameter(name, parameter)
        self.correction = _correction(spec, context)
        self.token_counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=context.device)
        self._rule, self._num_experts, self._route = spec.rule, spec.num_experts, context.op("route")
        self._can_route = context.can_record("route")
        self._product: ExpertsProduct | None = None

    def finish_loading(self) -> None:
        """Make the product of the loaded weights, then drop the parameters."""
        assert self._product is None, "finish_loading was called twice"
        weights: Mapping[str, nn.Parameter] = {
            name: weight for name, weight in self.named_parameters(recurse=False) if name != "correction"
        }
        self._product = self._format.finish_experts(weights, self.shape, self._dtype)
        self.is_recordable = self._product.is_recordable and self._can_route
        for name in weights:
            delattr(self, name)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden), ``logits`` (N, experts or more) -> this rank's part of the experts' output."""
        assert self._product is not None, "finish_loading comes first"
        slots = current_metadata().slot_mapping
        # In the last layer only some tokens of a prompt come here; they are not counted.
        load = ExpertLoad(self.token_counts, slots) if len(slots) == len(x) else None
        return self._product(x, *self._route(logits[:, : self._num_experts], self._rule, self.correction, load))


def _expert_names(spec: ExpertsSpec, context: LayerContext) -> list[str]:
    """The modules that hold the experts in a checkpoint, in the first of the ways to store them."""
    stored = spec.stored[0]
    numbers = range(spec.num_experts) if stored.kind == "each" else range(1)
    names = dict.fromkeys((stored.gate, stored.up, stored.down))
    return [context.at(name.format(number)).path for number in numbers for name in names]


def _correction(spec: ExpertsSpec, context: LayerContext) -> nn.Parameter | None:
    """What is added to each expert's score for the choice, float32."""
    if spec.correction is None:
        return None
    shape = (spec.num_experts,) if spec.correction_rows is None else (spec.correction_rows, spec.num_experts)
    source = Source(
        name=context.at(spec.correction).path,
        shape=shape,
        taken=whole(shape),
        target=(Span(0, spec.num_experts),),
        decode=torch.Tensor.flatten,
    )
    return context.parameter((spec.num_experts,), (source,), dtype=torch.float32)
