"""Paged attention in plain PyTorch: it runs everywhere, and is the oracle of the other backends."""

from typing import NamedTuple

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.calls import (
    TILE,
    AttentionCall,
    ChunkCall,
    GroupCall,
    LayerInput,
    StaircaseMasks,
    TokenSelection,
    batched_mask,
)
from tp_engine.attention.gathering import MAX_CALL_TOKENS, QueryGroup, RowReader, group_requests, visible_keys
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, scatter_kv, tokens_to_store
from tp_engine.plan import IntArray


class _LayerKind(NamedTuple):
    """The properties that layers with the same calls share.  ``dtype`` is that of the computation.

    ``rows_per_block`` as ``row_ids`` takes it.
    ``reads_fresh_keys``: the step's own keys are at hand, and equal to their copies in the cache.
    """

    window: int | None
    queries_per_kv_head: int
    block_size: int
    rows_per_block: int
    dtype: torch.dtype
    reads_fresh_keys: bool


class TorchBackend:
    """Gathers the keys of each group of similar requests, then calls ``scaled_dot_product_attention``.

    Rows of the cache and masks are worked out once per step and shared by all layers with the same window.
    """

    name = "torch"
    can_capture_decodes = False
    can_capture_prompts = False

    def __init__(self) -> None:
        self._masks = StaircaseMasks(TILE)
        self._reader = RowReader()
        self._groups: list[QueryGroup] = []
        self._calls: dict[_LayerKind, list[AttentionCall]] = {}
        self._kept: torch.Tensor | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Group this step's requests; see ``AttentionBackend``."""
        limit = MAX_CALL_TOKENS[metadata.block_table.device.type]
        self._groups = group_requests(metadata.host_query_lens, metadata.host_seq_lens, limit)
        self._calls = {}
        self._kept = tokens_to_store(metadata.slot_mapping) if metadata.is_padded else None

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        if new is not None and self._kept is None:
            scatter_kv(new, kv, metadata.slot_mapping)
        elif new is not None:
            own = KeyValue(new.key[self._kept], new.value[self._kept])
            scatter_kv(own, kv, metadata.slot_mapping[self._kept])
        layer = LayerInput(query, new, kv, shape, self._reader)
        kind = _kind_of(layer)
        calls = self._calls.get(kind)
        if calls is None:  # it is the first layer of its kind
            calls = self._calls[kind] = [self._plan_call(group, kind, metadata) for group in self._groups]
        if len(calls) == 1 and isinstance(calls[0].tokens, slice) and calls[0].tokens == slice(0, len(query)):
            return calls[0].run(layer, kind.dtype).to(query.dtype)
        out = query.new_zeros(*query.shape[:2], shape.value_dim or shape.head_dim)
        for call in calls:
            out[call.tokens] = call.run(layer, kind.dtype).to(query.dtype)
        return out

    def _plan_call(self, group: QueryGroup, kind: _LayerKind, metadata: AttentionMetadata) -> AttentionCall:
        """Rows and masks of one group for one kind of layer."""
        device = metadata.block_table.device
        tokens, batch, query_len = _tokens_of(group, device), len(group.rows), group.query_len
        if batch == 1 and query_len > 1:
            assert isinstance(tokens, slice)
            seq_len = int(group.seq_lens[0])
            if kind.reads_fresh_keys and seq_len == query_len:
                return ChunkCall(tokens, None, 0, seq_len, self._masks)
            keys = visible_keys(group, kind.window, metadata, kind.block_size, kind.rows_per_block)
            return ChunkCall(tokens, keys.rows, int(keys.first[0]), seq_len, self._masks)
        keys = visible_keys(group, kind.window, metadata, kind.block_size, kind.rows_per_block)
        mask = None
        if not keys.is_exact or query_len > 1:
            repeats = kind.queries_per_kv_head if query_len > 1 else 1
            offsets = np.arange(query_len * repeats, dtype=np.int32) // repeats
            own_key: IntArray = (group.seq_lens - query_len - keys.first)[:, np.newaxis] + offsets
            mask = batched_mask(own_key, keys.num_keys, kind.window, kind.dtype, device).unsqueeze(1)
        return GroupCall(tokens, keys.rows, mask, batch, query_len)


def _kind_of(layer: LayerInput) -> _LayerKind:
    query, cache, shape = layer.query, layer.kv.cache, layer.shape
    # Half precision is emulated on CPUs, many times slower than float32.
    is_slow = query.dtype == torch.float16 and query.device.type == "cpu"
    return _LayerKind(
        window=shape.sliding_window,
        queries_per_kv_head=shape.num_heads // shape.num_kv_heads,
        block_size=cache.shape[2],
        rows_per_block=layer.kv.rows_per_block if layer.kv.scales is None else cache.shape[2],
        dtype=torch.float32 if is_slow else query.dtype,
        reads_fresh_keys=layer.new is not None and cache.dtype == query.dtype,
    )


def _tokens_of(group: QueryGroup, device: torch.device) -> TokenSelection:
    """The step's tokens that are this group's queries, request by request."""
    if group.is_consecutive:
        start = int(group.starts[0])
        return slice(start, start + len(group.rows) * group.query_len)
    tokens = group.starts[:, np.newaxis] + np.arange(group.query_len, dtype=np.int64)
    return torch.from_numpy(tokens.ravel()).to(device)
