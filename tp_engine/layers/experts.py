"""Experts under tensor parallelism: a router, which every rank has whole, and this rank's part of the experts.

::

    split (the default)      rank r has its part of each expert's inner size, as in a dense MLP
    expert parallelism       rank r has some experts, whole; pairs of other experts add nothing here

Either way each rank makes a part of the block's output, and the all-reduce at the end of the block adds the parts up.
All ranks route alike, because they start from the same bits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.experts.routing import ExpertLoad, route
from tp_engine.layers.attention import current_metadata
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.lora_experts import ExpertAdapters
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization.base import ExpertsProduct, SeparateExperts, TunedExperts
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.experts import share_experts
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.mlp import ExpertsSpec
from tp_engine.model_config.spec import NormSpec
from tp_engine.weights.source import Source, Span, tie_sources, whole, whole_source


class Router(Layer):
    """Logits of all experts, and of the shared MLP's gate if there is one: one product, the same on all ranks.

    With ``norm`` it reads the residual stream, normalised by it.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self._widens = spec.routes_in_float32 and context.dtype is not torch.float32
        own = replace(context, dtype=torch.float32) if self._widens else context
        modules = [(spec.router, spec.num_experts), *([(spec.shared_gate, 1)] if spec.shared_gate else [])]
        parts = tuple(
            Part(name=context.at(name).path, stored_rows=rows, rows=Span(0, rows), room=rows) for name, rows in modules
        )
        shape = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
        chosen = Dense(is_invariant=context.tp_invariant, choices=context.choices)
        router = own.unadapted.at(spec.router)
        self.linear = LocalLinear(shape, bias=spec.router_bias, context=router, format=chosen)
        self.norm = None
        if spec.router_scale is not None:
            rule = NormSpec(name="", tensor=spec.router_scale, eps=spec.router_eps, factor=hidden_size**-0.5)
            self.norm = Norm(rule, hidden_size, context=context)
        self._to_float32, self._cap_logits = context.op("to_float32"), context.op("cap_logits")
        self._cap, self._num_experts = spec.router_cap, spec.num_experts
        self.is_recordable = context.can_record("to_float32", "cap_logits")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden) -> (N, experts [+ 1]), in the type of ``x`` or float32."""
        if self.norm is not None:
            x = self.norm(x)
        logits: torch.Tensor = self.linear(self._to_float32(x) if self._widens else x)
        if self._cap is not None:
            self._cap_logits(logits[:, : self._num_experts], 1.0, self._cap)
        return logits


class ExpertsById(Layer):
    """The experts of each token id, which every rank has whole."""

    def __init__(self, spec: ExpertsSpec, *, context: LayerContext) -> None:
        super().__init__()
        assert spec.by_id is not None
        shape = (spec.vocab_size, spec.rule.top_k)
        source = whole_source(context.at(spec.by_id).path, shape, dtype=torch.int64, init=0.0)
        self.table = context.parameter(shape, (source,), dtype=torch.int64)
        self.is_recordable = context.device.type == "cuda"

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` (N,) -> (N, top_k) int64."""
        return self.table.index_select(0, token_ids.long())


class Experts(Layer):
    """The experts of a layer that are on this rank, in their format, and the routing to them.

    ``token_counts`` (experts,) int64 counts the tokens that went to each expert.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.format, self._dtype = context.format_of(_expert_names(spec, context)), context.dtype
        self.shape = share_experts(
            spec,
            hidden_size,
            context.path,
            rank=context.rank,
            world_size=context.world_size,
            splits=context.splits_experts,
            block=self.format.experts_block,
            num_shards=context.num_shards,
        )
        created = self.format.create_experts(context, self.shape)
        for name, parameter in created.items():
            self.register_parameter(name, parameter)
        if {"fused", "transposed"} <= {one.kind for one in spec.stored}:  # one may be square, both cannot
            tie_sources(created.values())
        rows = spec.correction_rows
        shape = (spec.num_experts,) if rows is None else (rows, spec.num_experts)
        self.correction = _one_for_each(spec.correction, shape, context)
        self.expert_scale = _one_for_each(spec.expert_scale, (spec.num_experts,), context)
        self.token_counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=context.device)
        self._rule, self._num_experts, self._output = spec.rule, spec.num_experts, context.output
        is_plain = spec.rule.scores == "sqrt_softplus" or spec.by_id is not None
        self._route: Callable[..., Any] = route if is_plain else context.op("route")
        self._can_route = context.can_record("route") and not (is_plain and context.device.type == "cpu")
        self._product: ExpertsProduct | None = None
        self.adapters: ExpertAdapters | None = None
        if context.adapters is not None and context.adapters.of_experts:
            self.adapters = ExpertAdapters(self.shape, context)

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        if not isinstance(self.format, TunedExperts):
            return ()
        found = self.format.tuned_experts(self._weights(), self.shape, self._dtype, device_type)
        return () if found is None else (found,)

    def _weights(self) -> Mapping[str, nn.Parameter]:
        others = ("correction", "expert_scale")
        return {name: weight for name, weight in self.named_parameters(recurse=False) if name not in others}

    def finish_loading(self) -> None:
        """Make the product of the loaded weights, then drop the parameters."""
        assert self._product is None, "finish_loading was called twice"
        weights = self._weights()
        self._product = self.format.finish_experts(weights, self.shape, self._dtype)
        if self.adapters is not None:
            assert isinstance(self._product, SeparateExperts), "check_expert_adapters refuses other formats"
        self.is_recordable = self._product.is_recordable and self._can_route
        for name in weights:
            delattr(self, name)

    def forward(self, x: torch.Tensor, logits: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` (N, hidden), ``logits`` (N, experts or more) -> this rank's part of the experts' output.

        ``given`` (N, top_k) int64 are the tokens' experts, if the logits do not choose.
        """
        assert self._product is not None, "finish_loading comes first"
        slots = current_metadata().slot_mapping
        # In the last layer only some tokens of a prompt are computed; they are not counted.
        load = ExpertLoad(self.token_counts, slots) if len(slots) == len(x) else None
        own = logits[:, : self._num_experts]
        fixed = {} if given is None else {"given": given}
        chosen = self._route(own, self._rule, self.correction, load, self.expert_scale, **fixed)
        if self.adapters is None:
            return self._output(self._product(x, *chosen))
        return self._output(self.adapters.mix(cast("SeparateExperts", self._product), x, *chosen))


def _expert_names(spec: ExpertsSpec, context: LayerContext) -> list[str]:
    """The modules that hold the experts in a quantised checkpoint."""
    stored = spec.named_by_rules
    numbers = range(spec.num_experts) if stored.kind == "each" else range(1)
    names = dict.fromkeys((*stored.inputs(spec.activation), stored.down))
    return [context.at(name.format(number)).path for number in numbers for name in names]


def _one_for_each(name: str | None, shape: tuple[int, ...], context: LayerContext) -> nn.Parameter | None:
    """A number for each expert, float32, stored in ``shape``; None without a ``name``."""
    if name is None:
        return None
    name, target = context.at(name).path, (Span(0, shape[-1]),)
    source = Source(name=name, shape=shape, taken=whole(shape), target=target, decode=torch.Tensor.flatten)
    return context.parameter((shape[-1],), (source,), dtype=torch.float32)
