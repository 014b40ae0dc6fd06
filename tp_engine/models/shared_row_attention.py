"""Attention to one row per token that is key and value, with older tokens compressed (``model_config/compression.py``;
``attention/compressed.py`` attends).

::

    x -> in_proj -> [ query latent | row ]                        the same on every rank
    query latent -> q_a_norm -> q_b_proj -> queries of this rank's heads, normalised, turned
    row -> kv_norm, turned                                        cached: key and value of all heads
    x -> compressor -> entries, normalised, turned                cached at their rate; what is not complete is a state
    outputs, turned back -> o_a_proj of each group of heads -> o_b_proj, this rank's columns
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.attention.compressed import CachedEntries, IndexQueries, attend_compressed
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.compression import CompressionRule, compress_decode, compress_prefill
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.attention import Attention, current_metadata, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear, RowParallelLinear, whole_linear
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization.dense import Dense
from tp_engine.layers.quantization.stored import LinearShape, Part
from tp_engine.layers.recurrent import KeepsState, chunks_of
from tp_engine.model_config.compression import CompressionSpec, SharedRowSpec
from tp_engine.model_config.mla import IndexSpec
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, NormSpec
from tp_engine.weights.source import Source, Span, equal_share, times, vector_source


def turned(heads: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], *, back: bool = False) -> torch.Tensor:
    """Turn the last elements of ``heads`` (N, heads, size), pairs of neighbours, by ``cos_sin`` (N, pairs) each."""
    cos, sin = (one.float().unsqueeze(1) for one in cos_sin)
    kept, pairs = heads.tensor_split((heads.shape[-1] - 2 * cos.shape[-1],), -1)
    first, second = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
    sin = -sin if back else sin
    found = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((kept, found.to(heads.dtype)), -1)


def angles_at(rotation: Rotation, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the pairs at ``positions`` (N,): (N, pairs) each."""
    cos, sin = rotation.table.index_select(0, positions).chunk(2, -1)
    return cos, sin


class IndexRows:
    """The entries of a layer's index in the cache, of ``dim`` elements."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.index_kv: LayerKv | None = None


class CompressedRows(Attention):
    """A layer's entries in the cache, and those of its index; it never attends itself."""

    def __init__(self, shape: AttentionShape, backend: AttentionBackend, group: int, index: IndexRows | None) -> None:
        super().__init__(shape, backend, group, indexer=index)
        self.index = index


class Compressor(KeepsState):
    """Makes the entries of a layer, and those of its index, in the KV ``group`` of its own."""

    def __init__(
        self, spec: CompressionSpec, hidden_size: int, eps: float, shape: AttentionShape, *,
        backend: AttentionBackend, group: int, context: LayerContext,
    ) -> None:  # fmt: skip
        super().__init__(spec.state_kind)
        self.spec, self.top_k = spec, 0 if spec.index is None else spec.index.top_k
        sizes = [(context, spec.dim), *([(context.at("indexer"), spec.index_dim)] if spec.index_dim else [])]
        parts = [
            Part(
                name=own.at(name).path,
                stored_rows=spec.num_series * size,
                rows=Span(series * size, size),
                room=size,
            )
            for name in ("kv_proj", "gate_proj")
            for series in range(spec.num_series)
            for own, size in sizes
        ]
        shape_of_all = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=tuple(parts))
        self.in_proj = LocalLinear(shape_of_all, bias=False, context=context.at("kv_proj").unadapted)
        rows, first, sources = Span(0, spec.rate), 0, []
        for own, size in sizes:
            stored = (spec.rate, spec.num_series * size)
            for series in range(spec.num_series):
                taken, target = Span(series * size, size), Span(series * spec.width + first, size)
                path = own.at("position_bias").path
                sources.append(Source(name=path, shape=stored, taken=(rows, taken), target=(rows, target)))
            first += size
        bias_shape = (spec.rate, spec.num_series * spec.width)
        self.bias = context.parameter(bias_shape, tuple(sources), dtype=torch.float32)
        self.norms = nn.ModuleList(
            Norm(NormSpec(name="kv_norm", eps=eps), size, context=own.at("kv_norm")) for own, size in sizes
        )
        own_shape = replace(shape, head_dim=spec.dim, value_dim=spec.dim)
        self.rows = CompressedRows(own_shape, backend, group, IndexRows(spec.index_dim) if spec.index_dim else None)
        self._rule: CompressionRule | None = None
        self._store = context.op("store_kv")

    def finish_loading(self) -> None:
        """Make the constants."""
        spec = self.spec
        bias = self.bias.view(spec.rate, spec.num_series, spec.width)
        self._rule = CompressionRule(spec.rate, spec.num_series, spec.width, bias)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> None:
        """Go on with the windows of ``x`` (N, hidden), and store the entries of those that are complete."""
        assert self._rule is not None, "finish_loading comes first"
        batch, rate = current_metadata(self.rows.group), self.spec.rate
        made, positions, count, parts = self.in_proj(x), rotation.positions, batch.num_decodes, []
        if count:
            assert self.states is not None and batch.decode_rows is not None, "decodes need the states of their rows"
            own = made[:count], positions[:count]
            parts.append(compress_decode(*own, self._rule, self.states, batch.decode_rows, batch.draft_runs))
        if len(x) > count:
            first = (batch.host_seq_lens - batch.host_query_lens)[count:].tolist()
            parts.append(compress_prefill(made[count:], first, self._rule, self.states, chunks_of(batch)))
        assert self.rows.kv is not None, "there is no cache yet"
        slots = self._slots(batch, positions)
        complete = (slots >= 0).nonzero().squeeze(1)
        entries, slots = torch.cat(parts)[complete].to(x.dtype), slots[complete]
        angles = angles_at(rotation, positions[complete] - rate + 1)
        kept = entries.split([size for size in (self.spec.dim, self.spec.index_dim) if size], 1)
        index = self.rows.index
        for norm, own, kv in zip(self.norms, kept, (self.rows.kv, index and index.index_kv), strict=False):
            normed: torch.Tensor = norm(own.contiguous())
            rows = turned(normed.unsqueeze(1), angles)
            self._store(KeyValue(rows, rows), kv, slots)

    def _slots(self, batch: AttentionMetadata, positions: torch.Tensor) -> torch.Tensor:
        """Where the entry goes that a token completes; -1: it completes none."""
        assert self.rows.kv is not None
        rate, room = self.spec.rate, self.rows.kv.cache.shape[2]
        requests = torch.from_numpy(np.arange(batch.num_requests).repeat(batch.host_query_lens)).to(positions.device)
        entries = positions // rate
        blocks = batch.block_table[requests, entries // room].long()
        is_last = (positions % rate == rate - 1) & (batch.slot_mapping >= 0)
        return torch.where(is_last, blocks * room + entries % room, -1)


class IndexOfEntries(Layer):
    """The queries that choose among entries; every rank has all of them."""

    def __init__(self, spec: IndexSpec, hidden_size: int, query_rank: int, *, context: LayerContext) -> None:
        super().__init__()
        self._spec = spec
        self.q_b_proj = whole_linear("q_b_proj", query_rank, spec.num_heads * spec.dim, context)
        # Never quantised, whatever config.json says.
        exact = replace(context, dtype=torch.float32, format_of=lambda names: Dense(choices=context.choices))
        self.weights_proj = whole_linear("weights_proj", hidden_size, spec.num_heads, exact.at("scorer"))

    def forward(
        self, x: torch.Tensor, latent: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], kv: LayerKv
    ) -> IndexQueries:
        """``x`` (N, hidden) and ``latent`` (N, query_rank), both normalised -> the step's index queries."""
        spec = self._spec
        queries = turned(self.q_b_proj(latent).unflatten(1, (spec.num_heads, spec.dim)), angles)
        weights = self.weights_proj(x.float()) * (spec.num_heads * spec.dim) ** -0.5
        return IndexQueries(queries, weights, kv, spec.top_k)


class SharedRowAttention(Layer):
    """Projections, rotation, attention, this rank's part of the output projection; its rows are in KV ``group``, and
    its entries in ``entries_group``."""

    is_recordable = False

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rope: RopeSpec | None,
        *,
        backend: AttentionBackend,
        group: int,
        context: LayerContext,
        entries_group: int | None = None,
        source: None = None,
    ) -> None:
        super().__init__()
        own_spec = spec.shared_row
        assert own_spec is not None and rope is not None and rope.rotary_dim == own_spec.rope_dim and source is None
        self._eps, self._head_dim, rank = own_spec.eps, spec.head_dim, own_spec.query_rank
        own = equal_share(spec.num_heads, context.rank, context.world_size)
        modules = [(context.at(name).path, size) for name, size in (("q_a_proj", rank), ("kv_proj", spec.head_dim))]
        parts = tuple(Part(name=name, stored_rows=size, rows=Span(0, size), room=size) for name, size in modules)
        first = LinearShape(stored_columns=hidden_size, columns=Span(0, hidden_size), parts=parts)
        self.in_proj = LocalLinear(first, bias=False, context=context.at("q_a_proj"))
        self._sizes = rank, spec.head_dim
        self.q_norm, self.kv_norm = (
            Norm(NormSpec(name=name, eps=own_spec.eps), size, context=context.at(name))
            for name, size in (("q_a_norm", rank), ("kv_norm", spec.head_dim))
        )
        below, rows = context.at("q_b_proj"), times(own, spec.head_dim)
        part = Part(name=below.path, stored_rows=spec.out_size, rows=rows, room=rows.size)
        queries = LinearShape(stored_columns=rank, columns=Span(0, rank), parts=(part,))
        self.q_b_proj = LocalLinear(queries, bias=False, context=below)
        self.o_a_proj, self.o_b_proj = self._make_output(own_spec, spec, hidden_size, context)
        stored = vector_source(context.at("sinks").path, spec.num_heads, own)
        self.sinks = context.parameter((own.size,), (stored,), dtype=torch.float32)
        shape = AttentionShape(
            num_heads=own.size,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            scale=spec.scale,
            sliding_window=spec.window,
            sinks=self.sinks,
            value_dim=spec.head_dim,
        )
        self.attention = Attention(shape, backend, group)
        self.compressor: Compressor | None = None
        self.index: IndexOfEntries | None = None
        if (compression := own_spec.compression) is not None:
            assert entries_group is not None
            below = context.at("compressor")
            self.compressor = Compressor(
                compression, hidden_size, own_spec.eps, shape, backend=backend, group=entries_group, context=below
            )
            if compression.index is not None:
                self.index = IndexOfEntries(compression.index, hidden_size, rank, context=below.at("indexer"))
        self._store = context.op("store_kv")

    @staticmethod
    def _make_output(
        own: SharedRowSpec, spec: AttentionSpec, hidden_size: int, context: LayerContext
    ) -> tuple[nn.ModuleList, RowParallelLinear]:
        """A projection of each of this rank's groups of heads, and the one of all groups."""
        groups, below = equal_share(own.num_groups, context.rank, context.world_size), context.at("o_a_proj")
        columns, rank = spec.out_size // own.num_groups, own.group_rank
        projections = nn.ModuleList()
        for group in range(groups.start, groups.start + groups.size):
            rows = Span(group * rank, rank)
            part = Part(name=below.path, stored_rows=own.num_groups * rank, rows=rows, room=rank)
            shape = LinearShape(stored_columns=columns, columns=Span(0, columns), parts=(part,))
            projections.append(LocalLinear(shape, bias=False, context=below.unadapted))
        last = RowParallelLinear(own.num_groups * rank, hidden_size, bias=False, context=context.at("o_b_proj"))
        return projections, last

    @property
    def readers(self) -> list[LocalLinear]:
        """No layers: what is compressed is made of rows, not codes."""
        return []

    def forward(self, x: Rows, rotation: Rotation | None, wanted: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, hidden), normalised -> this rank's part of the block's output, of the tokens ``wanted`` (n,)."""
        out = only(wanted, self._attend(x, rotation))
        groups = out.chunk(len(self.o_a_proj), 1)
        projected = [own(group.contiguous()) for own, group in zip(self.o_a_proj, groups, strict=True)]
        return self.o_b_proj.part(torch.cat(projected, 1))

    def store(self, x: Rows, rotation: Rotation | None) -> None:
        """Store the rows that ``forward`` would."""
        self._attend(x, rotation)

    def _attend(self, x: Rows, rotation: Rotation | None) -> torch.Tensor:
        """Store rows and entries, and attend: (N, heads x head_dim)."""
        assert isinstance(x, torch.Tensor) and rotation is not None
        attention, angles = self.attention, angles_at(rotation, rotation.positions)
        latent, row = self.in_proj(x).split(self._sizes, 1)
        latent = self.q_norm(latent.contiguous())
        query = self.q_b_proj(latent).unflatten(1, (-1, self._head_dim))
        query = turned(F.rms_norm(query, query.shape[-1:], None, self._eps), angles)
        rows = turned(self.kv_norm(row.contiguous()).unsqueeze(1), angles)
        metadata, kv = current_metadata(attention.group), attention.kv
        assert kv is not None, "there is no cache yet"
        self._store(KeyValue(rows, rows), kv, metadata.slot_mapping)
        entries: CachedEntries | None = None
        if self.compressor is not None:
            self.compressor(x, rotation)
            own, index = self.compressor.rows, None
            assert own.kv is not None
            if self.index is not None:
                assert own.index is not None and own.index.index_kv is not None
                index = self.index(x, latent, angles, own.index.index_kv)
            entries = CachedEntries(own.kv, self.compressor.spec.rate, current_metadata(own.group), index)
        attended = attend_compressed(query, kv, metadata, attention.shape, entries)
        return turned(attended, angles, back=True).flatten(1)
