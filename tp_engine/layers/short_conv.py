"""A layer with a short convolution between two gates instead of attention (``kernels/short_conv.py``).  Channels are
split over the ranks."""

import torch

from tp_engine.kernels.short_conv import ShortConvRule
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.recurrent import RecurrentMixer, behind, conv_sources, projection, rows_of
from tp_engine.model_config.recurrent import ShortConvSpec
from tp_engine.weights.source import equal_share


class ShortConv(RecurrentMixer):
    """The projection, the convolution, this rank's part of the output projection."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__(spec, hidden_size, operation="short_conv", context=context)
        size = spec.num_channels
        own = equal_share(size, context.rank, context.world_size)
        name = context.at("in_proj").path
        parts = tuple(rows_of(name, 3 * size, behind(first, own)) for first in (0, size, 2 * size))
        self.in_proj = projection(parts, hidden_size, context)
        taps = conv_sources(context.at("conv").path, size, spec.taps, (own,))
        self.conv = context.parameter((spec.taps, own.size), taps, dtype=torch.float32)

    @property
    def readers(self) -> list[LocalLinear]:
        return [self.in_proj]

    def make_rule(self) -> ShortConvRule:
        return ShortConvRule(self.kind, self.conv)
