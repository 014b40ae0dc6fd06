"""Attention over the cached rows of latent attention with a Triton kernel, for ``attention/mla.py``."""

from functools import cache

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.triton_backend import why_no_triton
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.paged_candidates import num_multiprocessors
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv

MAX_ROW_DIM = 576


class TritonMLABackend:
    """Stores, decodes and attends for chunks in a kernel launch each; nothing waits for the device.

    Queries are (N, heads, row_dim), as ``LatentMaps.absorb`` makes them, and outputs (N, heads, rank).
    """

    name = "triton"
    can_capture_decodes = True
    can_capture_prompts = False

    def __init__(self) -> None:
        from tp_engine.kernels.attention import paged_mla_triton
        from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS
        from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

        self._store_kv = store_kv_triton
        self._decode, self._attend_chunks = (paged_mla_triton.mla_decode_triton, paged_mla_triton.mla_chunks_triton)
        self._sizes = cache(paged_mla_triton.latent_sizes)
        self._max_arrivals = MAX_ARRIVALS
        self._arrivals: torch.Tensor | None = None
        self._num_chunk_tokens = 0
        self._step: AttentionMetadata | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Count the tokens of chunks; see ``AttentionBackend``."""
        self._step = metadata
        self._num_chunk_tokens = int(metadata.host_query_lens[metadata.num_decodes :].sum())

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if new is not None:
            self._store_kv(new, kv, metadata.slot_mapping)
        first, table, seq_lens = metadata.num_decodes, metadata.block_table, metadata.seq_lens
        out = _room(query, shape)
        if first:
            self._attend_rows(query[:first], kv, None, table[:first], seq_lens[:first], out[:first], shape)
        if self._num_chunk_tokens:
            size = shape.num_heads, query.dtype.itemsize, num_multiprocessors(query.device)
            self._attend_chunks(
                query, kv, table, seq_lens, metadata.query_start, out,
                scale=shape.scale, sizes=self._sizes(len(seq_lens) - first, *size, num_queries=self._num_chunk_tokens),
                arrivals=self._zeros(query), num_queries=self._num_chunk_tokens, first_request=first,
            )  # fmt: skip
        if first + self._num_chunk_tokens < len(query):
            out[first + self._num_chunk_tokens :] = 0.0
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
        sizes = self._sizes(len(query), shape.num_heads, query.dtype.itemsize, num_multiprocessors(query.device))
        self._decode(
            query, kv, table, seq_lens, out, scale=shape.scale, sizes=sizes, arrivals=self._zeros(query), chosen=chosen
        )

    def _zeros(self, query: torch.Tensor) -> torch.Tensor:
        """The counters of arrivals, made when first used."""
        if self._arrivals is None:
            self._arrivals = torch.zeros(self._max_arrivals, dtype=torch.int32, device=query.device)
        return self._arrivals


def _room(query: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Room for the outputs (n, heads, rank) of ``query`` (n, heads, row_dim)."""
    assert shape.value_dim is not None
    return torch.empty((*query.shape[:2], shape.value_dim), dtype=query.dtype, device=query.device)


def why_not_latents(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
    if needs.device_type == "cuda" and (largest := max(needs.head_dims)) > MAX_ROW_DIM:
        return f"a cached row has {largest} elements; it takes at most {MAX_ROW_DIM}: use attention_backend=torch"
    return why_no_triton(needs)
