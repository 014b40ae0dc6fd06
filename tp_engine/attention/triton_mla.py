"""Attention over the cached rows of latent attention with a Triton kernel, for ``attention/mla.py``."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.expanded import EXPANDED_PROMPTS, attend_expanded
from tp_engine.attention.expanded import shape_of as expanded_shape
from tp_engine.attention.triton_backend import why_no_triton
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.latent_candidates import LATENT_DECODES, LATENT_PROMPTS, shape_of
from tp_engine.kernels.attention.prompt_packages import PromptStep
from tp_engine.kernels.candidates import DEFAULTS, Choices, Run, Shape, Wanted
from tp_engine.kernels.candidates import chosen as chosen_run
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv

MAX_ROW_DIM = 576


class _RowKind(NamedTuple):
    """What decides which kernel runs: ``top_k``: the most chosen keys, None for all."""

    shape: AttentionShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    top_k: int | None = None


class TritonMLABackend:
    """Stores, decodes and attends for chunks in a kernel launch each; nothing waits for the device.

    Queries are (N, heads, row_dim), as ``LatentMaps.absorb`` makes them, and outputs (N, heads, rank).
    """

    name = "triton"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self, choices: Choices = DEFAULTS) -> None:
        from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS
        from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

        self._store_kv, self._choices = store_kv_triton, choices
        self._runs: dict[tuple[str, _RowKind, torch.device], Run] = {}
        self._expanded: dict[tuple[torch.dtype, torch.device, AttentionShape], Run] = {}
        self._max_arrivals = MAX_ARRIVALS
        self._arrivals: torch.Tensor | None = None
        self._chunks: PromptStep | None = None
        self._step: AttentionMetadata | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Find the chunks; see ``AttentionBackend``."""
        self._step, self._chunks, first = metadata, None, metadata.num_decodes
        query_lens = metadata.host_query_lens[first:]
        if num_queries := int(query_lens.sum()):
            self._chunks = PromptStep(
                metadata.block_table, metadata.seq_lens, metadata.query_start, first, num_queries, query_lens,
                metadata.host_seq_lens[first:],
            )  # fmt: skip

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if new is not None:
            self._store_kv(new, kv, metadata.slot_mapping)
        first, table, seq_lens = metadata.num_decodes, metadata.block_table, metadata.seq_lens
        out = _room(query, shape)
        if first:
            self._attend_rows(query[:first], kv, None, table[:first], seq_lens[:first], out[:first], shape)
        num_tokens = first
        if (chunks := self._chunks) is not None:
            attend = self._run(LATENT_PROMPTS, query, kv, shape)
            attend(query, out, kv, chunks, shape.scale, self._zeros(query))
            num_tokens += chunks.num_queries
        if num_tokens < len(query):
            out[num_tokens:] = 0.0
        return out

    def forward_chosen(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, chosen: ChosenKeys | None, shape: AttentionShape
    ) -> torch.Tensor:
        step = self._step
        assert step is not None and step.num_decodes == len(query), "prepared for these decodes"
        if new is not None:
            self._store_kv(new, kv, step.slot_mapping)
        out = _room(query, shape)
        self._attend_rows(query, kv, chosen, step.block_table, step.seq_lens, out, shape)
        return out

    def attend_to_chosen(
        self, query: torch.Tensor, kv: LayerKv, chosen: ChosenKeys, block_table: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        out = _room(query, shape)
        self._attend_rows(query, kv, chosen, block_table, chosen.counts, out, shape)
        return out

    def attend_expanded(self, query: torch.Tensor, rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        key = query.dtype, query.device, shape
        if key not in self._expanded:
            own = expanded_shape(shape, query.dtype)
            self._expanded[key] = chosen_run(EXPANDED_PROMPTS, own, query.device, self._choices)
        return attend_expanded(query, rows, shape, self._expanded[key])

    def _attend_rows(
        self,
        query: torch.Tensor,
        kv: LayerKv,
        chosen: ChosenKeys | None,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        shape: AttentionShape,
    ) -> None:
        """``query`` and ``out`` (n, heads, ...) of n requests with one query each."""
        top_k = None if chosen is None else chosen.positions.shape[1]
        attend = self._run(LATENT_DECODES, query, kv, shape, top_k)
        attend(query, out, kv, table, seq_lens, shape.scale, self._zeros(query), chosen)

    def _run(self, name: str, query: torch.Tensor, kv: LayerKv, shape: AttentionShape, top_k: int | None = None) -> Run:
        """The kernel that is chosen for such rows."""
        kind = _RowKind(shape, query.dtype, kv.cache.dtype, kv.cache.shape[2], top_k)
        key = name, kind, query.device
        if key not in self._runs:
            self._runs[key] = chosen_run(name, shape_of_rows(*kind), query.device, self._choices)
        return self._runs[key]

    def _zeros(self, query: torch.Tensor) -> torch.Tensor:
        """The counters of arrivals, made when first used."""
        if self._arrivals is None:
            self._arrivals = torch.zeros(self._max_arrivals, dtype=torch.int32, device=query.device)
        return self._arrivals


def _room(query: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Room for the outputs (n, heads, rank) of ``query`` (n, heads, row_dim)."""
    assert shape.value_dim is not None
    return torch.empty((*query.shape[:2], shape.value_dim), dtype=query.dtype, device=query.device)


def shape_of_rows(
    shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int, top_k: int | None = None
) -> Shape:
    """The shape of a layer's attention, for candidates."""
    assert shape.value_dim is not None
    return shape_of(
        num_heads=shape.num_heads,
        row_dim=shape.head_dim,
        rank=shape.value_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        block_size=block_size,
        top_k=top_k,
    )


def kernels_of_latents(shapes: Iterable[AttentionShape], needs: AttentionNeeds) -> list[Wanted]:
    """The operations with candidates that layers of these ``shapes`` run; those with a ``chooser`` attend to all keys
    in steps that have few."""
    found: list[Wanted] = []
    for shape in shapes:
        usual = shape, needs.dtype, needs.kv_cache_dtype, needs.block_size
        if shape.chooser is not None:
            found.append((LATENT_DECODES, shape_of_rows(*usual, shape.chooser.top_k)))
        found += [(LATENT_DECODES, shape_of_rows(*usual)), (LATENT_PROMPTS, shape_of_rows(*usual))]
        found.append((EXPANDED_PROMPTS, expanded_shape(shape, needs.dtype)))
    return found


def why_not_latents(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
    if needs.device_type == "cuda" and (largest := max(needs.head_dims)) > MAX_ROW_DIM:
        return f"a cached row has {largest} elements; it takes at most {MAX_ROW_DIM}: use attention_backend=torch"
    return why_no_triton(needs)
