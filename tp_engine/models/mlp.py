"""A layer's MLP, built from its spec: dense, or experts with a router.  Nothing here knows of ranks: the layers do."""

from __future__ import annotations

from functools import cached_property

import torch

from tp_engine.kernels.row_codes import Rows
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.experts import Experts, Router
from tp_engine.layers.formats.quantised_products import GatedPair, gated_pair
from tp_engine.layers.linear import GatedColumnParallelLinear, LocalLinear, RowParallelLinear
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec


class GatedMLP(Layer):
    """``down(activation(gate(x), up(x)))``, this rank's part of it."""

    def __init__(self, spec: MlpSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.gate_up_proj = GatedColumnParallelLinear(
            hidden_size,
            spec.inner_size,
            spec.activation,
            bias=spec.bias,
            context=context,
            fused_name=spec.fused_name,
        )
        self.down_proj = RowParallelLinear(
            spec.inner_size, hidden_size, bias=spec.bias, context=context.at("down_proj")
        )

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input."""
        return [self.gate_up_proj]

    @cached_property
    def _pair(self) -> GatedPair | None:
        """Both products as one, for many rows, if the weights have it."""
        return gated_pair(self.gate_up_proj.loaded, self.down_proj.loaded)

    def forward(self, x: Rows) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output."""
        pair = self._pair
        if pair is not None and len(x) > pair.more_than:
            return pair(x, self.gate_up_proj.bias, self.down_proj.own_bias)
        return self.down_proj.part(self.gate_up_proj(x))


class ExpertsMLP(Layer):
    """The sum of the chosen experts' outputs, and of the shared MLP's, this rank's part of it."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size, context=context)
        self.experts = Experts(spec, hidden_size, context=context)
        self.shared = (
            None if spec.shared is None else GatedMLP(spec.shared, hidden_size, context=context.at(spec.shared.name))
        )
        self._gate = spec.num_experts if spec.shared_gate else None
        self._add, self._add_gated = context.op("add"), context.op("add_gated")
        self.is_recordable = context.can_record("add", "add_gated")

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input; the router's reads values, so no norm writes codes for experts."""
        return [self.router.linear]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output."""
        logits = self.router(x)
        part: torch.Tensor = self.experts(x, logits)
        if self.shared is None:
            return part
        shared = self.shared(x)
        if self._gate is None:
            self._add(shared, part)
        else:
            self._add_gated(part, shared, logits[:, self._gate :])
        return part


def make_mlp(spec: MlpSpec | ExpertsSpec, hidden_size: int, *, context: LayerContext) -> GatedMLP | ExpertsMLP:
    """The MLP of a layer at ``context``."""
    own = context.at(spec.name)
    if isinstance(spec, ExpertsSpec):
        return ExpertsMLP(spec, hidden_size, context=own)
    return GatedMLP(spec, hidden_size, context=own)
