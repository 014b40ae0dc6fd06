"""One decoder layer, built from its ``LayerSpec``.

The modules that it is built from split themselves over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.attention import Attention, current_metadata, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.gated_delta_net import GatedDeltaNet
from tp_engine.layers.kimi_delta import KimiDelta
from tp_engine.layers.linear import LocalLinear, QKVParallelLinear, RowParallelLinear
from tp_engine.layers.mamba2 import Mamba2
from tp_engine.layers.norm import Norm, QKNorm
from tp_engine.layers.recurrent import RecurrentMixer
from tp_engine.layers.residual import Join, StreamScale
from tp_engine.layers.rotary import order_of
from tp_engine.layers.short_conv import ShortConv
from tp_engine.layers.streams import StreamJoin, StreamReader, read_within
from tp_engine.model_config.recurrent import GatedDeltaNetSpec, KimiDeltaSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, NormSpec
from tp_engine.models.layer_embeddings import LayerEmbedding
from tp_engine.models.mla_attention import MLAAttention
from tp_engine.models.mlp import ExpertsMLP, make_mlp
from tp_engine.models.shared_row_attention import SharedRowAttention
from tp_engine.weights.source import equal_share, vector_source

# What runs in the place of attention.
MIXERS: dict[type[RecurrentSpec], Callable[..., RecurrentMixer]] = {
    GatedDeltaNetSpec: GatedDeltaNet,
    KimiDeltaSpec: KimiDelta,
    ShortConvSpec: ShortConv,
    Mamba2Spec: Mamba2,
}


class SelfAttention(Layer):
    """Projections, rotation, attention, this rank's part of the output projection; its blocks are in KV ``group``.

    It reads rows of ``in_size``, ``hidden_size`` unless said otherwise.  ``source``: the layer whose keys and
    values it reads."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rope: RopeSpec | None,
        *,
        backend: AttentionBackend,
        group: int,
        context: LayerContext,
        in_size: int | None = None,
        source: SelfAttention | None = None,
    ) -> None:
        super().__init__()
        order = order_of(rope, spec.head_dim)
        self.qkv_proj = QKVParallelLinear(in_size or hidden_size, spec, order, context=context)
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim, hidden_size, bias=spec.out_bias, context=context.at("o_proj")
        )
        self.qk_norm = None if spec.qk_norm is None else QKNorm(spec.qk_norm, spec, order, context=context)
        self.sinks = None
        if spec.has_sinks:
            own = equal_share(spec.num_heads, context.rank, context.world_size)
            stored = vector_source(context.at("sinks").path, spec.num_heads, own)
            self.sinks = context.parameter((own.size,), (stored,), dtype=torch.float32)
        shape = AttentionShape(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            sliding_window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks,
            sees_whole_images=spec.sees_whole_images,
        )
        self.attention: Attention = Attention(shape, backend, group, None if source is None else source.attention)
        self._num_kv_heads = shape.num_kv_heads if source is None else 0  # of this layer's own
        self._num_all = shape.num_heads + 2 * self._num_kv_heads
        self._gate_spec, self._gate_heads = spec.gate, context.op("gate_heads")
        self._qk_norm_rope_store = context.op("qk_norm_rope_store")
        gating = () if spec.gate is None else ("gate_heads",)
        self.is_recordable = context.can_record("qk_norm_rope_store", *gating)

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input."""
        return [self.qkv_proj]

    def forward(self, x: Rows, rotation: Rotation | None, wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        projected = self.qkv_proj(x)
        out = only(wanted, self._attend(projected, rotation))
        if self._gate_spec is not None:
            gate = only(wanted, projected[:, self._num_all * self.attention.shape.head_dim :])
            self._gate_heads(out, gate, self._gate_spec.function)
        return self.o_proj.part(out)

    def store(self, x: Rows, rotation: Rotation | None) -> None:
        """Store the keys and values that ``forward`` would; backends attend in the same call."""
        self._attend(self.qkv_proj(x), rotation)

    def _attend(self, projected: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """Store the keys and values among what is ``projected`` (N, columns), and attend: (N, heads x head_dim)."""
        attention, shape, head_norm = self.attention, self.attention.shape, None
        if self._gate_spec is not None:
            projected = projected[:, : self._num_all * shape.head_dim]
        heads = projected.unflatten(1, (self._num_all, shape.head_dim))
        if self.qk_norm is not None:
            head_norm = self.qk_norm.head_norm
            if head_norm is None:
                self.qk_norm.normalise(heads)
        slots = current_metadata(attention.group).slot_mapping
        if self._num_kv_heads:
            states = self._qk_norm_rope_store(heads, self._num_kv_heads, head_norm, rotation, attention.kv, slots)
        else:
            states = self._qk_norm_rope_store(heads, 0, head_norm, rotation, None, slots)[0], None, None
        attended: torch.Tensor = attention(*states).flatten(1)
        return attended


AttentionBlock: TypeAlias = SelfAttention | MLAAttention | SharedRowAttention


class MixerLayer(Layer):
    """A layer with attention (``self_attn``), or what runs in its place (``mixer``)."""

    def _make_mixer(
        self, attention: AttentionSpec | RecurrentSpec, hidden_size: int, ropes: Sequence[RopeSpec],
        *, context: LayerContext, **places: Any,
    ) -> list[LocalLinear]:  # fmt: skip
        """Make it; return what reads its input.  ``places`` are ``backend``, ``group`` and ``source`` of one that
        attends."""
        self._rope, self._attends = None, isinstance(attention, AttentionSpec)
        if isinstance(attention, RecurrentSpec):
            self.mixer = MIXERS[type(attention)](attention, hidden_size, context=context.at(attention.name))
            return self.mixer.readers
        self._rope = attention.rope
        assert places["group"] is not None, "a layer that attends is in a KV group"
        make: Callable[..., AttentionBlock] = SelfAttention if attention.latent is None else MLAAttention
        make = make if attention.shared_row is None else SharedRowAttention
        rope = None if attention.rope is None else ropes[attention.rope]
        self.self_attn = make(attention, hidden_size, rope, context=context.at("self_attn"), **places)
        return self.self_attn.readers

    def _mix(self, x: Rows, rotations: Sequence[Rotation], wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        more = (None if self._rope is None else rotations[self._rope],) if self._attends else ()
        part: torch.Tensor = (self.self_attn if self._attends else self.mixer)(x, *more, wanted)
        return part

    def own_inputs(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the layer reads of a step's ``token_ids`` (N,) beside the stream: the last arguments of ``forward``."""
        return ()

    def store(self, x: Rows, rotations: Sequence[Rotation]) -> None:
        """Store the keys and values that ``forward`` would, of a layer that attends."""
        self.self_attn.store(x, None if self._rope is None else rotations[self._rope])


class DecoderLayer(MixerLayer):
    """One layer.  The model joins it to its neighbours with ``input_norm``, and with ``out_norm`` and ``out_scale`` of
    its last output."""

    def __init__(
        self, spec: LayerSpec, hidden_size: int, ropes: Sequence[RopeSpec], *, context: LayerContext, **places: Any
    ) -> None:
        """Build it; ``places`` are the last arguments of ``_make_mixer``."""
        super().__init__()
        assert spec.attention is not None and spec.mlp is not None, "one block: a OneBlockLayer"
        readers = self._make_mixer(spec.attention, hidden_size, ropes, context=context, **places)
        self._has_beside = spec.beside is not None
        self.mlp = mlp = make_mlp(spec, hidden_size, context=context)

        def norm(one: NormSpec | None) -> Norm | None:
            return None if one is None else Norm(one, hidden_size, context=context.at(one.name))

        self.input_norm, self.out_norm = norm(spec.input_norm), norm(spec.mlp_out_norm)
        self.attention_out_norm, self.mlp_norm = norm(spec.attention_out_norm), norm(spec.mlp_norm)
        norms = self.attention_out_norm, self.mlp_norm
        self.mixture: StreamReader | None = None
        self._join: Join | StreamJoin
        if spec.streams is None:
            self._join = Join(*norms, spec.residual_scale, mlp.readers, context=context)
        else:
            made = read_within(spec, spec.streams, *norms, hidden_size=hidden_size, context=context)
            self.mixture, self.mlp_mixture, self._join = made
        self.readers = [*readers, *(mlp.readers if spec.is_parallel else ())]
        self.stream_scale = None if spec.stream_scale is None else StreamScale(context.at(spec.stream_scale))
        self.out_scale, self.returns_sum = spec.residual_scale, spec.beside is not None
        self.embedding: LayerEmbedding | None = None
        if spec.embedding is not None:
            assert not spec.is_parallel
            self._mlp_out_norm = self.out_norm
            self._join_mlp = Join(self.out_norm, None, self.out_scale, is_summed=self.returns_sum, context=context)
            self.embedding = LayerEmbedding(spec.embedding, hidden_size, context=context)
            self.out_norm, self.out_scale, self.returns_sum = norm(spec.embedding.out_norm), 1.0, True
        self._by_id = mlp.by_id if isinstance(mlp, ExpertsMLP) else None
        self._is_parallel, self._add = spec.is_parallel, context.op("add")
        self.is_recordable = self._join.is_recordable

    def own_inputs(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return () if self._by_id is None else (self._by_id(token_ids),)

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor,
        rotations: Sequence[Rotation],
        wanted: torch.Tensor | None,
        embedding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer: its ``readers`` read ``x`` (N, hidden); ``residual`` is the stream, or
        the rows of several (``layers/streams.py``), and changes in place.

        Returns this rank's part of the layer's last output, not yet added, or if it ``returns_sum`` all of the output;
        and the stream.  With ``wanted`` (n,) int64, both are of these tokens only:
        the others need only their keys and values.  ``x`` is then a tensor.  ``embedding`` (N, size) is the
        layer's own, or the tokens' experts.
        """
        part = self._mix(x, rotations, wanted)
        residual = only(wanted, residual)
        if not self._is_parallel:
            own = self._join.for_readers(part, residual)
            if self._by_id is not None and embedding is not None:
                return self.mlp(own, given=only(wanted, embedding)), residual
            part = self.mlp(own, residual) if self._has_beside else self.mlp(own)
            if self.embedding is None:
                return part, residual
            assert embedding is not None
            return self.embedding(self._join_mlp(part, residual), only(wanted, embedding)), residual
        if wanted is not None:
            assert isinstance(x, torch.Tensor), "codes are of all tokens"
            x = only(wanted, x)
        both = self.mlp(x)
        self._add(part, both)
        return both, residual
