"""Latent attention, built from its spec (``model_config/mla.py`` has the sizes; ``attention/mla.py`` attends).

::

    x -> in_proj -> [ queries or their latent | cached row ]           the same on every rank, but for the queries
    query latent -> q_a_layernorm -> q_b_proj -> queries of this rank's heads
    attention over the cached rows, by the maps of this rank's heads -> o_proj, this rank's columns

With an indexer (``indexer.py``), queries attend to the keys that it chooses, alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.latent_maps_candidates import ABSORB, PROJECT, shape_of
from tp_engine.kernels.attention.latents import HEADS_TOGETHER
from tp_engine.kernels.candidates import Wanted
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.attention import Attention, current_metadata, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear, RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.dense import choose_product
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.model_config.mla import MLASpec
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, NormSpec
from tp_engine.models.indexer import Indexer
from tp_engine.weights.source import Span, equal_share, times


class LatentUp(LocalLinear):
    """The maps from a latent to the keys and values of this rank's heads: ``LatentMaps``.

    After loading they are one tensor ``up`` (heads, nope_dim + value_dim, rank) in the model's type, in any format of
    the checkpoint, because both forms of attention take parts of it.
    """

    def __init__(self, spec: MLASpec, num_heads: int, *, context: LayerContext) -> None:
        own = equal_share(num_heads, context.rank, context.world_size)
        shape = _shape(spec.rank, (context.path, num_heads * spec.up_dim, times(own, spec.up_dim)))
        super().__init__(replace(shape, rounds_rows=False), bias=False, context=context.unadapted)
        self.query_dim, self.value_dim = spec.query_dim, spec.value_dim
        self._spec, self._num_heads = spec, own.size
        self.up = torch.empty(0, dtype=torch.float32, device="cpu")
        self._device = context.device
        self._shape_of_maps = shape_of(
            num_heads=own.size, nope_dim=spec.nope_dim, rope_dim=spec.rope_dim, rank=spec.rank,
            value_dim=spec.value_dim, dtype=context.dtype,
        )  # fmt: skip
        self._absorb, self._release = (context.chosen(name, self._shape_of_maps) for name in (ABSORB, PROJECT))
        self._can_record = context.can_record("absorb_w_uk", "project_w_uv")
        self._products: list[Product] = []

    def kernels(self, device_type: str) -> Iterable[Wanted]:
        # Its product is only read at the load.
        return [(name, self._shape_of_maps) for name in (ABSORB, PROJECT)] if device_type == "cuda" else ()

    def finish_loading(self) -> None:
        """Read the maps out of the format's product, by the latents that have a single 1."""
        super().finish_loading()
        units = torch.eye(self._spec.rank, dtype=self._dtype, device=self._device)
        self.up = self.product(units, None).T.reshape(self._num_heads, self._spec.up_dim, -1).contiguous()
        self._product = None
        self.is_recordable = self._can_record
        if self._device.type == "cpu":
            self._products = [choose_product(part.flatten(0, 1)) for part in self.up.split(HEADS_TOGETHER)]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        absorbed: torch.Tensor = self._absorb(query, self.up, self._spec.nope_dim)
        return absorbed

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self._release(attended, self.up, self._spec.nope_dim)
        return values

    def up_project(self, latents: torch.Tensor, first_head: int) -> torch.Tensor:
        return self._products[first_head // HEADS_TOGETHER](latents, None).view(len(latents), -1, self._spec.up_dim)

    def expand(self, latents: torch.Tensor, heads: slice) -> torch.Tensor:
        return F.linear(latents, self.up[heads].flatten(0, 1)).view(len(latents), -1, self._spec.up_dim)


class MLAAttention(Layer):
    """Projections, rotation, attention, this rank's part of the output projection; its blocks are in KV ``group``.

    ``source``: the layer whose choice of keys it shares.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rope: RopeSpec | None,
        *,
        backend: AttentionBackend,
        group: int,
        context: LayerContext,
        source: MLAAttention | None = None,
    ) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self._latent, self._is_interleaved = latent, rope is not None and rope.is_interleaved
        own = equal_share(spec.num_heads, context.rank, context.world_size)
        num_rows = spec.num_heads * latent.query_dim
        rows = ("kv_a_proj_with_mqa", latent.row_dim, Span(0, latent.row_dim))
        if latent.query_rank is None:
            first = ("q_proj", num_rows, times(own, latent.query_dim))
        else:
            first = ("q_a_proj", latent.query_rank, Span(0, latent.query_rank))
            below = context.at("q_b_proj")
            self.q_norm = _norm("q_a_layernorm", latent.query_rank, latent.eps, context)
            shape = _shape(latent.query_rank, (below.path, num_rows, times(own, latent.query_dim)))
            self.q_b_proj = LocalLinear(shape, bias=False, context=below)
        parts = [(context.at(name).path, size, taken) for name, size, taken in (first, rows)]
        self.in_proj = LocalLinear(_shape(hidden_size, *parts), bias=False, context=context.at(first[0]))
        self.kv_norm = _norm("kv_a_layernorm", latent.rank, latent.eps, context)
        self.kv_b_proj = LatentUp(latent, spec.num_heads, context=context.at("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            spec.num_heads * latent.value_dim, hidden_size, bias=False, context=context.at("o_proj")
        )
        self.indexer: Indexer | None = None
        if latent.index is not None and source is None:
            assert latent.query_rank is not None
            self.indexer = Indexer(latent.index, hidden_size, latent.query_rank, context=context.at("indexer"))
        shape_of_rows = AttentionShape(
            num_heads=own.size,
            num_kv_heads=1,
            head_dim=latent.row_dim,
            scale=spec.scale,
            value_dim=latent.rank,
            latent=self.kv_b_proj,
            chooser=self.indexer if source is None else source.indexer,
        )
        self.attention = Attention(shape_of_rows, backend, group, indexer=self.indexer)
        self._choosers = (self.indexer,) if source is None else (source.indexer,)  # a tuple: not a part of this module
        if self._choosers[0] is not None and source is not None:
            self._choosers[0].num_layers += 1
        self._num_heads, self._num_first = own.size, first[2].size
        self._prepare = context.op("prepare_latents")
        self.is_recordable = context.can_record("prepare_latents")

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read its input."""
        return [self.in_proj, *([] if self.indexer is None else self.indexer.readers)]

    def forward(self, x: Rows, rotation: Rotation | None, wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        return self.o_proj.part(only(wanted, self._attend(x, rotation)))

    def store(self, x: Rows, rotation: Rotation | None) -> None:
        """Store the rows that ``forward`` would; backends attend in the same call."""
        self._attend(x, rotation)

    def _attend(self, x: Rows, rotation: Rotation | None) -> torch.Tensor:
        """Store the rows, and attend: (N, heads x size of a value)."""
        attention, rank = self.attention, self._latent.rank
        query, rows = self.in_proj(x).split_with_sizes((self._num_first, self._latent.row_dim), 1)
        if self._latent.query_rank is not None:
            query_latent = self.q_norm(query)
            query = self.q_b_proj(query_latent)
            if self.indexer is not None:
                assert isinstance(x, torch.Tensor) and rotation is not None, "weights are made of rows, not codes"
                slots = current_metadata(attention.group).slot_mapping
                self.indexer(x, query_latent, rotation, slots)
        query, rows = self._prepare(
            query.view(len(x), self._num_heads, -1), rows, self.kv_norm.rule, rotation, self._is_interleaved,
            attention.kv, current_metadata(attention.group).slot_mapping,
        )  # fmt: skip
        values = None if rows is None else rows[..., :rank]
        attended: torch.Tensor = attention(query, rows, values).reshape(len(x), -1)
        if self._choosers[0] is not None:
            self._choosers[0].leave()
        return attended


def _shape(columns: int, *parts: tuple[str, int, Span]) -> LinearShape:
    """A product of whole columns, of parts (module, stored rows, this rank's rows) one above the other."""
    return LinearShape(
        stored_columns=columns,
        columns=Span(0, columns),
        parts=tuple(Part(name=name, stored_rows=size, rows=own, room=own.size) for name, size, own in parts),
    )


def _norm(name: str, size: int, eps: float, context: LayerContext) -> Norm:
    return Norm(NormSpec(name=name, eps=eps), size, context=context.at(name))
