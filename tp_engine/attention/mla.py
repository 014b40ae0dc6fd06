"""Latent attention: decodes and short chunks read the cached rows, long chunks read keys and values made from them.

``model_config/mla.py`` has the sizes.  The cache has one part: a row per token, the same for all heads::

    absorbed    query (heads, query_dim) -> (heads, row_dim); attention over the rows, whose first `rank` elements are
                the values; the means (heads, rank) -> (heads, value_dim).  Any backend with ``value_dim`` can do it
    expanded    rows -> keys (heads, query_dim) and values (heads, value_dim); attention over these

Both give the same up to rounding.  A pair of query and key costs 2 rank + rope_dim multiplications in the first form
and query_dim + value_dim in the second, a third, but each key must be made once: that pays from about 130 queries of a
request on.  A request's form depends on its own chunk alone, whatever else is in the step.

A query that attends to chosen keys alone (``selection.py``) takes the absorbed form.  The inner backend computes
decodes, and the prompts of requests with more keys than are chosen, if it can (``AttendsToChosen``), and short chunks
beside them; otherwise PyTorch computes such requests.  The step's other requests are as usual.
"""

from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.attention.expanded import MIN_EXPANDED_QUERIES, attend_by_torch, attend_expanded
from tp_engine.attention.selection import attend_chosen
from tp_engine.attention.tiles import slots_of
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, states_at
from tp_engine.kernels.ops import op

# Bounds the partial results of the rows of a prompt that attend to chosen keys in one call: one for each _SPLIT keys.
_MAX_PARTIAL_ELEMENTS, _SPLIT = {"cpu": 1 << 22, "cuda": 1 << 28}, 256

TokenSelection: TypeAlias = slice | torch.Tensor
"""Which of the step's tokens: a range, or their indices (tokens,) int64."""


@runtime_checkable
class AttendsToChosen(Protocol):
    """A backend whose decodes may attend to chosen keys alone, in recorded steps too."""

    def forward_chosen(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, chosen: ChosenKeys | None, shape: AttentionShape
    ) -> torch.Tensor:
        """``AttentionBackend.forward`` of a step of decodes, which attend to ``chosen``, or if None to all they see."""

    def attend_to_chosen(
        self, query: torch.Tensor, kv: LayerKv, chosen: ChosenKeys, block_table: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        """``query`` (n, heads, row_dim), each over the ``chosen`` keys of its blocks (n, M) int32, which are stored ->
        (n, heads, rank).  It needs no ``prepare``."""


@runtime_checkable
class AttendsExpanded(Protocol):
    """A backend with a faster ``attend_expanded``."""

    def attend_expanded(self, query: torch.Tensor, rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """Queries (t, heads, query_dim), the last positions of ``rows`` (n, 1, row_dim) -> (t, heads, value_dim).  It
        needs no ``prepare``; value_dim is at most query_dim, which is even."""


class MLABackend:
    """``inner`` attends over the cached rows; chunks with many queries are expanded here, on every device.

    Queries are (N, heads, query_dim) and outputs (N, heads, value_dim) of ``AttentionShape.latent``.
    """

    def __init__(self, inner: AttentionBackend, index_topk: int | None = None) -> None:
        self.name = inner.name
        self._of_chosen = inner if isinstance(inner, AttendsToChosen) else None
        self._of_expanded = inner if isinstance(inner, AttendsExpanded) else None
        self.can_capture_decodes = inner.can_capture_decodes and (index_topk is None or self._of_chosen is not None)
        self.can_capture_prompts = False  # the host chooses the form of each chunk
        self._inner = inner
        self._index_topk = index_topk
        # Of this step: what the inner backend computes, None for everything; requests that are expanded; and those
        # whose queries attend to chosen keys alone.
        self._rest: tuple[AttentionMetadata, TokenSelection] | None = None
        self._expanded: list[int] = []
        self._long: list[int] = []

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Choose the form of each request, by its own lengths; see ``AttentionBackend``."""
        self._rest = None
        first, lengths, seq_lens = metadata.num_decodes, metadata.host_query_lens, metadata.host_seq_lens
        is_expanded, is_long = lengths >= MIN_EXPANDED_QUERIES, np.zeros(len(lengths), dtype=np.bool_)
        is_expanded[:first] = False
        is_mixed = first < len(lengths) or self._of_chosen is None  # not only decodes that the inner backend takes
        if self._index_topk is not None and is_mixed and seq_lens.max(initial=0) > self._index_topk:
            is_long = seq_lens > self._index_topk
            if self._of_chosen is not None:  # the inner backend takes the decodes, and only these
                is_long |= ~is_expanded
                is_long[:first] = False
            is_expanded &= ~is_long
        self._expanded, self._long = np.flatnonzero(is_expanded).tolist(), np.flatnonzero(is_long).tolist()
        rest = np.flatnonzero(~(is_expanded | is_long))
        if len(rest) < len(lengths):
            self._rest = part_of_step(metadata, rest)
            metadata, _ = self._rest
        if len(rest):
            self._inner.prepare(metadata)

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if self._rest is None:
            return self._attend_rows(query, new, kv, metadata, shape)
        assert shape.latent is not None
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        out = query.new_zeros(len(query), shape.num_heads, shape.latent.value_dim)
        rest, tokens = self._rest
        if rest.num_requests:
            out[tokens] = self._attend_rows(query[tokens], None, kv, rest, shape)
        if self._expanded:
            self._expand(out, query, None if new is None else new.key, kv, metadata, shape)
        if self._long:
            self._attend_chosen(out, query, kv, metadata, shape)
        return out

    def _attend_chosen(
        self, out: torch.Tensor, query: torch.Tensor, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> None:
        """Write the outputs of the long requests' tokens, which attend to chosen keys alone, into ``out``."""
        maps, chooser, rank = shape.latent, shape.chooser, shape.value_dim
        assert maps is not None and chooser is not None and rank is not None
        lengths = metadata.host_query_lens
        starts = lengths.cumsum() - lengths
        for index in self._long:
            start, length = int(starts[index]), int(lengths[index])
            own = slice(start, start + length)
            if self._of_chosen is not None:
                self._attend_prompt(out[own], query[own], start, index, kv, metadata, shape)
                continue
            assert chooser.index_kv is not None, "a step with a cache"
            chosen = chooser.chosen(start, length, partial(_rows_of, chooser.index_kv, torch.float32, index, metadata))
            read = partial(_rows_of, kv, query.dtype, index, metadata)
            own_query = maps.absorb(query[own])
            out[own] = maps.values(attend_chosen(own_query, chosen, read, rank=rank, scale=shape.scale))

    def _attend_prompt(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        start: int,
        index: int,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> None:
        """Write the outputs of request ``index``'s prompt, the step's tokens from ``start`` on, into ``out``: each
        token as a decode, some at a time."""
        maps, chooser, backend = shape.latent, shape.chooser, self._of_chosen
        assert maps is not None and chooser is not None and backend is not None
        length, end = len(query), int(metadata.host_seq_lens[index])
        seq_lens = torch.arange(end - length + 1, end + 1, dtype=torch.int32, device=query.device)
        table = metadata.block_table[index, : -(-end // kv.cache.shape[2])].expand(length, -1)
        places, counts = chooser.of_rows(start, table, seq_lens)
        room = _MAX_PARTIAL_ELEMENTS[query.device.type]
        step = max(1, room // (shape.num_heads * shape.head_dim * -(-chooser.top_k // _SPLIT)))
        for first in range(0, length, step):
            own = slice(first, first + step)
            chosen = ChosenKeys(places[own], counts[own])
            rows = backend.attend_to_chosen(maps.absorb(query[own]), kv, chosen, table[own], shape)
            out[own] = maps.values(rows)

    def _attend_rows(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """The absorbed form, for the step that ``inner`` has prepared."""
        maps = shape.latent
        assert maps is not None
        if self._of_chosen is not None and shape.chooser is not None and metadata.num_decodes == metadata.num_requests:
            chosen = shape.chooser.of_rows(0, metadata.block_table, metadata.seq_lens)
            return maps.values(self._of_chosen.forward_chosen(maps.absorb(query), new, kv, chosen, shape))
        return maps.values(self._inner.forward(maps.absorb(query), new, kv, metadata, shape))

    def _expand(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        new_rows: torch.Tensor | None,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> None:
        """Write the outputs of the requests in the expanded form into ``out``.  ``new_rows`` are this step's rows, None
        if they are only in the cache."""
        lengths = metadata.host_query_lens
        starts = lengths.cumsum() - lengths
        for index in self._expanded:
            start, length = int(starts[index]), int(lengths[index])
            own = slice(start, start + length)
            if new_rows is not None and metadata.host_seq_lens[index] == length and kv.cache.dtype == query.dtype:
                rows = new_rows[own]
            else:
                rows = _rows_of(kv, query.dtype, index, metadata).unsqueeze(1)
            out[own] = self._attend_expanded(query[own], rows, shape)

    def _attend_expanded(self, query: torch.Tensor, rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """Queries of one request over keys and values made from its ``rows``."""
        maps, backend = shape.latent, self._of_expanded
        assert maps is not None
        if backend is None or maps.value_dim > maps.query_dim or maps.query_dim % 2:
            return attend_expanded(query, rows, shape, attend_by_torch)
        return backend.attend_expanded(query, rows, shape)


def _rows_of(
    kv: LayerKv,
    dtype: torch.dtype,
    request: int,
    metadata: AttentionMetadata,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cached rows (n, width) of a request of the step, at ``positions`` (n,) int64, or all if None."""
    table = metadata.block_table[request]
    if positions is None:
        positions = torch.arange(int(metadata.host_seq_lens[request]), device=table.device, dtype=torch.int64)
    return states_at(kv, 0, slots_of(table, positions, kv.cache.shape[2])).squeeze(1).to(dtype)


def part_of_step(metadata: AttentionMetadata, rows: npt.NDArray[np.int_]) -> tuple[AttentionMetadata, TokenSelection]:
    """The step of the requests ``rows`` (n,), rising, alone, and which of the whole step's tokens are theirs."""
    count, lengths, query_start = len(rows), metadata.host_query_lens[rows], metadata.query_start[: len(rows) + 1]
    tokens: TokenSelection = slice(0, int(lengths.sum()))
    requests: TokenSelection = slice(0, count)
    if count and rows[-1] >= count:  # they are not the first ones
        device = query_start.device
        ends, own_ends = metadata.host_query_lens.cumsum()[rows], lengths.cumsum()
        places = (ends - own_ends).repeat(lengths) + np.arange(own_ends[-1])
        tokens, requests = (torch.from_numpy(array).to(device) for array in (places, rows))
        query_start = torch.from_numpy(np.concatenate(([0], own_ends)).astype(np.int32)).to(device)
    part = AttentionMetadata(
        num_decodes=int((rows < metadata.num_decodes).sum()),
        slot_mapping=metadata.slot_mapping[tokens],
        block_table=metadata.block_table[requests],
        seq_lens=metadata.seq_lens[requests],
        query_start=query_start,
        host_query_lens=lengths,
        host_seq_lens=metadata.host_seq_lens[rows],
        is_padded=metadata.is_padded,
    )
    return part, tokens
