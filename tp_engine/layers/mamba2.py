"""A state space layer instead of attention (``kernels/mamba2.py``).

Heads are split over the ranks, each with the keys and queries of its group; groups are split, too.  If there are fewer
groups than ranks, a group spans ranks, which add up the squares of its elements: one all-reduce of a number per token.
"""

from functools import partial

import torch

from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.layers.context import LayerContext
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.recurrent import RecurrentMixer, behind, conv_sources, projection, rows_of
from tp_engine.model_config.recurrent import Mamba2Spec
from tp_engine.weights.source import Source, Span, equal_share, kv_head_share, times, vector_source


class Mamba2(RecurrentMixer):
    """Projections, the state space recurrence, the grouped norm, this rank's part of the output projection."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__(spec, hidden_size, operation="mamba2", context=context)
        heads = equal_share(spec.num_heads, context.rank, context.world_size)
        groups = kv_head_share(spec.num_groups, context.rank, context.world_size)
        own, keys = times(heads, spec.head_dim), times(groups, spec.state_size)
        size, key_size = spec.out_size, spec.num_groups * spec.state_size
        # Stored in the order x, B, C, and kept as C, B, x.
        channels = (behind(size + key_size, keys), behind(size, keys), own)
        part = partial(rows_of, context.at("in_proj").path, 2 * (size + key_size) + spec.num_heads)
        ends = own, behind(2 * (size + key_size), heads)
        self.in_proj = projection(
            tuple(map(part, (*(behind(size, one) for one in channels), *ends))), hidden_size, context
        )
        conv, stored, kept = context.at("conv1d").path, size + 2 * key_size, self.kind.num_channels
        self.conv = context.parameter(
            (spec.taps, kept), conv_sources(conv, stored, spec.taps, channels), dtype=torch.float32
        )
        self.conv_bias = (
            context.parameter((kept,), _bias_sources(f"{conv}.bias", stored, channels), dtype=torch.float32)
            if spec.has_conv_bias
            else torch.zeros(kept, device=context.device, dtype=torch.float32)
        )
        self.log_decay, self.dt_bias, self.skip = (
            context.parameter(
                (heads.size,), (vector_source(context.at(name).path, spec.num_heads, heads),), dtype=torch.float32
            )
            for name in ("A_log", "dt_bias", "D")
        )
        norm = vector_source(context.at("norm").path + ".weight", size, own, init=1.0)
        self.norm = context.parameter((own.size,), (norm,))
        self._norm, self._squares = context.op("norm_groups"), context.op("group_squares")
        self._spans_ranks = context.world_size > spec.num_groups
        self._communicator, self._eps, self._group_size = context.communicator, spec.eps, size // spec.num_groups
        self.is_recordable = context.can_record("mamba2_decode", "norm_groups", "group_squares")

    @property
    def readers(self) -> list[LocalLinear]:
        return [self.in_proj]

    @property
    def reduced_bytes(self) -> int:
        return torch.float32.itemsize if self._spans_ranks else 0

    def make_rule(self) -> Mamba2Rule:
        """Turn the logarithms into factors."""
        return Mamba2Rule(self.kind, self.conv, self.conv_bias, -self.log_decay.exp(), self.dt_bias, self.skip)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Normalise the groups: (N, width) float32 -> (N, width), in the model's type.  A collective if a group spans
        the ranks."""
        num_groups, squares = self.kind.num_key_heads, None
        if self._spans_ranks:
            squares = self._communicator.all_reduce(self._squares(out, num_groups))
        normed: torch.Tensor = self._norm(out, self.norm, num_groups, self._eps, squares, self._group_size)
        return normed


def _bias_sources(name: str, stored: int, channels: tuple[Span, ...]) -> tuple[Source, ...]:
    """The convolution's bias, stored (stored,), for these ``channels``, one after another."""
    first, sources = 0, []
    for own in channels:
        sources.append(Source(name=name, shape=(stored,), taken=(own,), target=(Span(first, own.size),)))
        first += own.size
    return tuple(sources)
