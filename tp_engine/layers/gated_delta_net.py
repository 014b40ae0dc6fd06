"""A layer with the gated delta rule in the place of attention (``kernels/gated_delta_net.py``).

Value heads are split over the ranks, each with the key head that it reads; key heads are repeated like KV heads where
there are fewer of them than ranks.  Each rank keeps the states of its own heads.
"""

from functools import partial

import torch

from tp_engine.attention.base import AttentionMetadata
from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.layers.attention import current_metadata, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear, RowParallelLinear
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.spec import GatedDeltaNetSpec
from tp_engine.weights.source import Source, Span, equal_share, kv_head_share, times, vector_source


class GatedDeltaNet(Layer):
    """Projections, the delta rule, this rank's part of the output projection.

    ``states`` is None until ``bind_states``: memory is measured before there are states, with new requests.
    """

    def __init__(self, spec: GatedDeltaNetSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        shares = HeadShares(spec, context)
        self.kind = spec.kv_kind.on(context.world_size)
        self.in_proj = _product(shares.input_parts(context), hidden_size, context)
        self.gate_proj = _product(shares.gate_parts(context), hidden_size, context)
        self.out_proj = RowParallelLinear(
            spec.num_value_heads * spec.value_dim, hidden_size, bias=False, context=context.at("out_proj")
        )
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
        self.states: LayerStates | None = None
        self._eps = spec.eps
        self._rule: DeltaRule | None = None
        self._step, self._chunks = context.op("gated_delta_net_decode"), context.op("gated_delta_net_prefill")
        self.is_recordable = context.can_record("gated_delta_net_decode")

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input."""
        return [self.in_proj, self.gate_proj]

    @property
    def rule(self) -> DeltaRule:
        """The loaded constants."""
        assert self._rule is not None, "finish_loading comes first"
        return self._rule

    def finish_loading(self) -> None:
        """Turn the logarithms into factors."""
        decay = -self.log_decay.exp()
        self._rule = DeltaRule(self.kind, self.conv, decay, self.dt_bias, self.norm, self._eps)

    def bind_states(self, states: LayerStates | None) -> None:
        """Keep the states of all rows here from now on; None: nowhere."""
        self.states = states

    def forward(self, x: Rows, wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        batch, mixed, gates = current_metadata(), self.in_proj(x), self.gate_proj(x)
        num_decodes, rule, parts = batch.num_decodes, self.rule, []
        if num_decodes:
            assert self.states is not None and batch.decode_rows is not None, "decodes need the states of their rows"
            places = batch.decode_rows, batch.draft_runs
            parts.append(self._step(mixed[:num_decodes], gates[:num_decodes], rule, self.states, *places))
        if len(mixed) > num_decodes:
            chunks = chunks_of(batch)
            parts.append(self._chunks(mixed[num_decodes:], gates[num_decodes:], rule, self.states, chunks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj.part(only(wanted, out))


def chunks_of(batch: AttentionMetadata) -> list[Chunk]:
    """Return the prefills of a step."""
    lengths = batch.host_query_lens[batch.num_decodes :]
    computed = batch.host_seq_lens[batch.num_decodes :] - lengths
    starts = lengths.cumsum() - lengths
    rows = batch.prefill_rows.tolist() or [-1] * len(lengths)
    return [
        Chunk(start, count, None if row < 0 else row, before == 0)
        for start, count, row, before in zip(starts.tolist(), lengths.tolist(), rows, computed.tolist(), strict=True)
    ]


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
        """Return the rows of q, k, v and z."""
        spec, keys, values = self._spec, self._key_rows, self._value_rows
        if not spec.is_fused:
            stored = 2 * self._key_size + self._value_size
            of_qkv = partial(_part, context.at("in_proj_qkv").path, stored)
            return (
                of_qkv(keys),
                of_qkv(_behind(self._key_size, keys)),
                of_qkv(_behind(2 * self._key_size, values)),
                _part(context.at("in_proj_z").path, self._value_size, values),
            )
        dim, of_values = spec.key_dim, spec.num_value_heads // spec.num_key_heads * spec.value_dim
        step = 2 * (dim + of_values)
        fused = partial(_part, context.at("in_proj_qkvz").path, 2 * (self._key_size + self._value_size), step=step)
        return (
            fused(keys, first=0, count=dim),
            fused(keys, first=dim, count=dim),
            fused(values, first=2 * dim, count=of_values),
            fused(values, first=2 * dim + of_values, count=of_values),
        )

    def gate_parts(self, context: LayerContext) -> tuple[Part, ...]:
        """Return the rows of b and a."""
        spec = self._spec
        if not spec.is_fused:
            names = ("in_proj_b", "in_proj_a")
            return tuple(_part(context.at(name).path, spec.num_value_heads, self.value) for name in names)
        count = spec.num_value_heads // spec.num_key_heads
        name, stored = context.at("in_proj_ba").path, 2 * spec.num_value_heads
        return tuple(_part(name, stored, self.value, first=first, count=count, step=2 * count) for first in (0, count))

    def conv_sources(self, context: LayerContext) -> tuple[Source, ...]:
        """Return the convolution's weights, stored (channels, 1, taps) and kept (taps, channels)."""
        spec, first, sources = self._spec, 0, []
        stored = (2 * self._key_size + self._value_size, 1, spec.taps)
        rows = self._key_rows, _behind(self._key_size, self._key_rows), _behind(2 * self._key_size, self._value_rows)
        for own in rows:
            sources.append(
                Source(
                    name=context.at("conv1d").path + ".weight",
                    shape=stored,
                    taken=(own, Span(0, 1), Span(0, spec.taps)),
                    target=(Span(0, spec.taps), Span(first, own.size)),
                    decode=lambda values: values.squeeze(1).t(),
                )
            )
            first += own.size
        return tuple(sources)


def _product(parts: tuple[Part, ...], hidden_size: int, context: LayerContext) -> LocalLinear:
    shape = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
    return LocalLinear(shape, bias=False, context=context)


def _part(name: str, stored: int, rows: Span, *, first: int = 0, count: int = 1, step: int = 1) -> Part:
    return Part(name=name, stored_rows=stored, rows=rows, room=rows.size, first=first, count=count, step=step)


def _behind(first: int, rows: Span) -> Span:
    return Span(first + rows.start, rows.size)
