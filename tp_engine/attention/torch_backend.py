"""Paged attention in plain PyTorch: it runs everywhere, and is the oracle of the other backends."""

from typing import NamedTuple

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.tiles import attend, attend_last, cached_states, hidden_keys, sinks_by_kv_head, slots_of
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, scatter_kv, tokens_to_store

# Keys that the decodes of one call read, padding included, if it has several.
_MAX_CALL_KEYS = {"cpu": 4096, "cuda": 16384}
# Contexts of one call differ by less than this factor, and this many keys.
_LENGTH_RATIO, _LENGTH_STEP = 1.5, 64


class _Decodes(NamedTuple):
    """Requests of one call: ``rows`` (B,) int64, the ``slots`` (B, keys) of their keys, and a mask (B, 1, 1, keys)."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


class TorchBackend:
    """Gathers keys and calls ``scaled_dot_product_attention``: for decodes of similar length together, for prompts
    chunk by chunk, in tiles."""

    name = "torch"
    can_capture_decodes = False
    can_capture_prompts = False

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None
        self._decodes: dict[tuple[int | None, int, torch.dtype], list[_Decodes]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Find the tokens to store; see ``AttentionBackend``."""
        self._kept, self._decodes = tokens_to_store(metadata.slot_mapping) if metadata.is_padded else None, {}

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if new is not None and self._kept is None:
            scatter_kv(new, kv, metadata.slot_mapping)
        elif new is not None:
            own = KeyValue(new.key[self._kept], new.value[self._kept])
            scatter_kv(own, kv, metadata.slot_mapping[self._kept])
        out = query.new_zeros(*query.shape[:2], shape.value_dim or shape.head_dim)
        # Half precision is emulated on CPUs, many times slower than float32.
        dtype = torch.float32 if query.dtype == torch.float16 and query.device.type == "cpu" else query.dtype
        window, block_size = shape.sliding_window, kv.cache.shape[2]
        kind = window, block_size, dtype
        if kind not in self._decodes:  # it is the first layer of its kind
            self._decodes[kind] = _plan_decodes(metadata, *kind)
        for decodes in self._decodes[kind]:
            states = cached_states(kv, decodes.slots.flatten(), shape, dtype)
            attended = _attend_decodes(query[decodes.rows].to(dtype), states, decodes.mask, shape)
            out[decodes.rows] = attended.to(query.dtype)
        start = first = metadata.num_decodes
        lengths, ends = metadata.host_query_lens[first:].tolist(), metadata.host_seq_lens[first:].tolist()
        for request, (length, end) in enumerate(zip(lengths, ends, strict=True), start=first):
            chunk, start = slice(start, start + length), start + length
            if length and end:
                begin = 0 if window is None else max(0, end - length - window + 1)
                places = torch.arange(begin, end, device=query.device, dtype=torch.int64)
                states = cached_states(kv, slots_of(metadata.block_table[request], places, block_size), shape, dtype)
                out[chunk] = attend_last(query[chunk].to(dtype), states, shape).to(query.dtype)
        return out


def _plan_decodes(
    metadata: AttentionMetadata, window: int | None, block_size: int, dtype: torch.dtype
) -> list[_Decodes]:
    """The step's decodes in calls of requests of similar length, without padding."""
    device, lengths = metadata.block_table.device, metadata.host_seq_lens[: metadata.num_decodes]
    waiting = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    calls = []
    while len(waiting):
        longest = int(lengths[waiting[0]])
        is_similar = lengths[waiting] * _LENGTH_RATIO + _LENGTH_STEP > longest
        count = min(int(is_similar.sum()), max(1, _MAX_CALL_KEYS[device.type] // longest))
        rows, waiting = torch.from_numpy(np.sort(waiting[:count])).to(device), waiting[count:]
        last = metadata.seq_lens[rows].long()[:, None] - 1
        # Beyond a request's end its last key is repeated: another request's memory may hold NaN.
        num_keys = longest if window is None else min(longest, window)
        places = last.clamp(min=num_keys - 1) - num_keys + 1 + torch.arange(num_keys, device=device, dtype=torch.int64)
        mask = hidden_keys(places[:, None], last[:, None], window, dtype)
        slots = slots_of(metadata.block_table[rows], torch.minimum(places, last), block_size)
        calls.append(_Decodes(rows, slots, mask[:, None]))
    return calls


def _attend_decodes(query: torch.Tensor, states: KeyValue, mask: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """``query`` (B, heads, head_dim) over the keys of each request, equally many and in order: the queries that share a
    KV head become more query positions."""
    keys, values = (one.unflatten(0, (len(query), -1)).transpose(1, 2) for one in states)
    sinks = sinks_by_kv_head(shape)
    grouped = query.unflatten(1, (shape.num_kv_heads, -1))
    out = attend(grouped, keys, values, mask, shape=shape, sinks=None if sinks is None else sinks[..., None])
    return out.flatten(1, 2)
