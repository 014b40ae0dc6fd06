"""A layer with the gated delta rule instead of attention (``kernels/gated_delta_net.py``).

Value heads are split over the ranks, each with the key head that it reads; key heads are repeated like KV heads where
there are fewer of them than ranks.
"""

from functools import partial

import torch

from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.stored import Part
from tp_engine.layers.recurrent import RecurrentMixer, behind, conv_sources, projection, rows_of
from tp_engine.model_config.recurrent import GatedDeltaNetSpec
from tp_engine.weights.source import Source, equal_share, kv_head_share, times, vector_source


class GatedDeltaNet(RecurrentMixer):
    """Projections, the delta rule, this rank's part of the output projection."""

    def __init__(self, spec: GatedDeltaNetSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__(spec, hidden_size, operation="gated_delta_net", context=context)
        shares = HeadShares(spec, context)
        self.in_proj = projection(shares.input_parts(context), hidden_size, context)
        self.gate_proj = projection(shares.gate_parts(context), hidden_size, context)
        self.conv = context.parameter(
            (spec.taps, self.kind.num_channels), shares.conv_sources(context), dtype=torch.float32
        )
        self.log_decay, self.dt_bias = (
            context.parameter(
                (shares.value.size,),
                (vector_source(context.at(name).path, spec.num_value_heads, shares.value),),
                dtype=torch.float32,
            )
            for name in ("A_log", "dt_bias")
        )
        norm = vector_source(context.at("norm").path + ".weight", spec.value_dim, init=1.0)
        self.norm = context.parameter((spec.value_dim,), (norm,), dtype=torch.float32)
        self._eps = spec.eps

    @property
    def readers(self) -> list[LocalLinear]:
        return [self.in_proj, self.gate_proj]

    def make_rule(self) -> DeltaRule:
        """Turn the logarithms into factors."""
        return DeltaRule(self.kind, self.conv, -self.log_decay.exp(), self.dt_bias, self.norm, self._eps)


class HeadShares:
    """This rank's key heads and value heads, and where the stored modules have them."""

    def __init__(self, spec: GatedDeltaNetSpec, context: LayerContext) -> None:
        self._spec = spec
        self.key = kv_head_share(spec.num_key_heads, context.rank, context.world_size)
        self.value = equal_share(spec.num_value_heads, context.rank, context.world_size)
        self._key_rows, self._value_rows = times(self.key, spec.key_dim), times(self.value, spec.value_dim)
        self._key_size = spec.num_key_heads * spec.key_dim
        self._value_size = spec.num_value_heads * spec.value_dim

    def input_parts(self, context: LayerContext) -> tuple[Part, ...]:
        """The rows of q, k, v and z."""
        spec, keys, values = self._spec, self._key_rows, self._value_rows
        if not spec.is_fused:
            stored = 2 * self._key_size + self._value_size
            of_qkv = partial(rows_of, context.at("in_proj_qkv").path, stored)
            return (
                of_qkv(keys),
                of_qkv(behind(self._key_size, keys)),
                of_qkv(behind(2 * self._key_size, values)),
                rows_of(context.at("in_proj_z").path, self._value_size, values),
            )
        dim, of_values = spec.key_dim, spec.num_value_heads // spec.num_key_heads * spec.value_dim
        step = 2 * (dim + of_values)
        fused = partial(rows_of, context.at("in_proj_qkvz").path, 2 * (self._key_size + self._value_size), step=step)
        return (
            fused(keys, first=0, count=dim),
            fused(keys, first=dim, count=dim),
            fused(values, first=2 * dim, count=of_values),
            fused(values, first=2 * dim + of_values, count=of_values),
        )

    def gate_parts(self, context: LayerContext) -> tuple[Part, ...]:
        """The rows of b and a."""
        spec = self._spec
        if not spec.is_fused:
            names = ("in_proj_b", "in_proj_a")
            return tuple(rows_of(context.at(name).path, spec.num_value_heads, self.value) for name in names)
        count = spec.num_value_heads // spec.num_key_heads
        name, stored = context.at("in_proj_ba").path, 2 * spec.num_value_heads
        return tuple(
            rows_of(name, stored, self.value, first=first, count=count, step=2 * count) for first in (0, count)
        )

    def conv_sources(self, context: LayerContext) -> tuple[Source, ...]:
        """The convolution's weights."""
        rows = self._key_rows, behind(self._key_size, self._key_rows), behind(2 * self._key_size, self._value_rows)
        name, stored = context.at("conv1d").path, 2 * self._key_size + self._value_size
        return conv_sources(name, stored, self._spec.taps, rows)
