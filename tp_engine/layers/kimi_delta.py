"""A layer with Kimi delta attention (``kernels/kda.py``); its heads are split over the ranks.

::

    x -> in_proj -> q, k, v of this rank's heads               x -> b_proj -> beta of its heads
    x -> f_a_proj -> f_b_proj -> decays of its heads           x -> g_a_proj -> g_b_proj -> gates of its heads

What f_a_proj and g_a_proj make is small, and every rank has all of it.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.kda import KdaRule
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear, whole_linear
from tp_engine.layers.recurrent import RecurrentMixer, conv_sources, projection, rows_of
from tp_engine.model_config.recurrent import KimiDeltaSpec
from tp_engine.weights.source import Source, Span, equal_share, times, vector_source


class KimiDelta(RecurrentMixer):
    """Projections, the delta rule, this rank's part of the output projection."""

    def __init__(self, spec: KimiDeltaSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__(spec, hidden_size, operation="kda", context=context, output="o_proj")
        heads, dim = equal_share(spec.num_heads, context.rank, context.world_size), spec.head_dim
        width, own = spec.num_heads * dim, times(heads, dim)

        def split(name: str, in_size: int, rows: int, taken: Span) -> LocalLinear:
            below = context.at(name)
            return projection((rows_of(below.path, rows, taken),), in_size, below)

        parts = tuple(rows_of(context.at(f"{name}_proj").path, width, own) for name in "qkv")
        self.in_proj = projection(parts, hidden_size, context.at("q_proj"))
        self.b_proj = split("b_proj", hidden_size, spec.num_heads, heads)
        self.f_a_proj, self.g_a_proj = (whole_linear(f"{one}_a_proj", hidden_size, dim, context) for one in "fg")
        self.f_b_proj, self.g_b_proj = (split(f"{one}_b_proj", dim, width, own) for one in "fg")
        convs = []
        for place, name in enumerate("qkv"):
            (one,) = conv_sources(context.at(f"{name}_conv1d").path, width, spec.taps, (own,))
            convs.append(replace(one, target=(Span(0, spec.taps), Span(place * own.size, own.size))))
        self.conv = context.parameter((spec.taps, 3 * own.size), convs, dtype=torch.float32)
        decay = Source(
            name=context.at("A_log").path,
            shape=(1, 1, spec.num_heads, 1),
            taken=(Span(0, 1), Span(0, 1), heads, Span(0, 1)),
            target=(Span(0, heads.size),),
            decode=torch.Tensor.flatten,
        )
        self.log_decay = context.parameter((heads.size,), (decay,), dtype=torch.float32)
        bias = vector_source(context.at("dt_bias").path, width, own)
        self.dt_bias = context.parameter((own.size,), (bias,), dtype=torch.float32)
        norm = vector_source(context.at("o_norm").path + ".weight", dim, init=1.0)
        self.norm = context.parameter((dim,), (norm,), dtype=torch.float32)
        self._eps, self._lower_bound = spec.eps, spec.lower_bound

    @property
    def readers(self) -> list[LocalLinear]:
        return [self.in_proj, self.b_proj, self.f_a_proj, self.g_a_proj]

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        return ()

    def project(self, x: Rows) -> list[torch.Tensor]:
        return [self.in_proj(x), self.b_proj(x), self.f_b_proj(self.f_a_proj(x)), self.g_b_proj(self.g_a_proj(x))]

    def make_rule(self) -> KdaRule:
        """Turn the logarithms into factors."""
        rates = -self.log_decay.exp()
        return KdaRule(self.kind, self.conv, rates, self.dt_bias, self.norm, self._eps, self._lower_bound)
