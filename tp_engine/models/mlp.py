"""A layer's MLP, built from its spec: dense, or experts with a router.  Nothing here knows of ranks: the layers do."""

from functools import cached_property

import torch

from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.experts import Experts, ExpertsById, Router
from tp_engine.layers.linear import GatedColumnParallelLinear, LocalLinear, RowParallelLinear, whole_linear
from tp_engine.layers.lora import has_adapters
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization.quantised_products import GatedPair, gated_pair
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.spec import BesideSpec, LayerSpec


class GatedMLP(Layer):
    """``down(activation(gate(x), up(x)))``, or without a gate ``down(activation(up(x)))``, this rank's part of it."""

    def __init__(self, spec: MlpSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.gate_up_proj = GatedColumnParallelLinear(
            hidden_size, spec.inner_size, spec.activation, bias=spec.bias, context=context, fused_name=spec.fused_name
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
        """Both products as one, for many rows without adapters, if the weights have it."""
        return gated_pair(self.gate_up_proj.loaded, self.down_proj.loaded)

    def forward(self, x: Rows) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output."""
        pair = self._pair
        if pair is not None and len(x) > pair.more_than and not has_adapters():
            return pair(x, self.gate_up_proj.bias, self.down_proj.own_bias)
        return self.down_proj.part(self.gate_up_proj(x))


class ExpertsMLP(Layer):
    """The sum of the chosen experts' outputs, and of the shared MLP's, this rank's part of it.

    The projection back from latents has no bias, so each rank applies it to its own part.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size, context=context)
        self.by_id = None if spec.by_id is None else ExpertsById(spec, context=context)
        latent = spec.latent
        self.experts = Experts(spec, hidden_size if latent is None else latent.size, context=context)
        self.to_latent = self.from_latent = None
        if latent is not None:
            self.to_latent = whole_linear(latent.down, hidden_size, latent.size, context)
            self.from_latent = whole_linear(latent.up, latent.size, hidden_size, context)
        self.shared = (
            None if spec.shared is None else GatedMLP(spec.shared, hidden_size, context=context.at(spec.shared.name))
        )
        self._gate = spec.num_experts if spec.shared_gate else None
        self._add, self._add_gated = context.op("add"), context.op("add_gated")
        self.is_recordable = context.can_record("add", "add_gated")

    @property
    def readers(self) -> list[LocalLinear]:
        """No layers, because experts read values and no codes."""
        return []

    def forward(
        self, x: torch.Tensor, routed_by: torch.Tensor | None = None, given: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output.

        The router reads ``routed_by`` (N, hidden) instead of ``x`` if it is given.  ``given`` (N, top_k) are the
        tokens' experts, by ``by_id``.
        """
        logits = self.router(x if routed_by is None else routed_by)
        part: torch.Tensor = self.experts(x if self.to_latent is None else self.to_latent(x), logits, given)
        if self.from_latent is not None:
            part = self.from_latent(part)
        if self.shared is None:
            return part
        shared = self.shared(x)
        if self._gate is None:
            self._add(shared, part)
        else:
            self._add_gated(part, shared, logits[:, self._gate :])
        return part


class MlpBesideExperts(Layer):
    """The normalised output of a dense MLP plus the normalised output of experts, whole on all ranks."""

    def __init__(self, mlp: MlpSpec, spec: BesideSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.mlp = GatedMLP(mlp, hidden_size, context=context.at(mlp.name))
        self.experts = ExpertsMLP(spec.experts, hidden_size, context=context.at(spec.experts.name))
        self.norm, self.out_norm, self.mlp_out_norm = (
            Norm(one, hidden_size, context=context.at(one.name))
            for one in (spec.norm, spec.out_norm, spec.mlp_out_norm)
        )
        self._communicator, self._add = context.joins, context.op("add")
        self.is_recordable = context.can_record("add")

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input, which is not that of the experts."""
        return self.mlp.readers

    def forward(self, x: Rows, stream: torch.Tensor) -> torch.Tensor:
        """``x`` (N, hidden), normalised for the dense MLP, and the ``stream`` (N, hidden) -> the block's output.

        Both norms need the sum of all ranks, so there are two all-reduces.
        """
        output: torch.Tensor = self.mlp_out_norm(self._communicator.all_reduce(self.mlp(x)))
        routed = self.experts(self.norm(stream), stream)
        self._add(self.out_norm(self._communicator.all_reduce(routed)), output)
        return output


def make_mlp(spec: LayerSpec, hidden_size: int, *, context: LayerContext) -> GatedMLP | ExpertsMLP | MlpBesideExperts:
    """Return the MLP block of the layer at ``context``."""
    mlp = spec.mlp
    assert mlp is not None, "a layer without an MLP has no MLP block"
    if spec.beside is not None:
        assert isinstance(mlp, MlpSpec), "experts stand beside a dense MLP"
        return MlpBesideExperts(mlp, spec.beside, hidden_size, context=context)
    own = context.at(mlp.name)
    if isinstance(mlp, ExpertsSpec):
        return ExpertsMLP(mlp, hidden_size, context=own)
    return GatedMLP(mlp, hidden_size, context=own)
