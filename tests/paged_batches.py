"""Random paged batches, and paged attention by loops, the oracle of every backend (row B10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.cpu.library import native_library
from tp_engine.cpu.paged_attention import in_kernel_order
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, is_quantised, layer_view, quantise
from tp_engine.plan import PAD_SLOT
from tp_engine.worker.batch.step_inputs import slots_for


@dataclass
class PagedBatch:
    """One step: the cache before it, its inputs, and every request's whole K/V (tokens, KV heads, head_dim)."""

    metadata: AttentionMetadata
    shape: AttentionShape
    kv_cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    all_keys: list[torch.Tensor]
    all_values: list[torch.Tensor]
    kv_scales: torch.Tensor | None = None

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """``backend``'s output; the cache does not change."""
        backend.prepare(self.metadata)
        return backend.forward(self.query, self.new, self.kv_for(backend), self.metadata, self.shape)

    @property
    def new(self) -> KeyValue:
        """This step's keys and values."""
        return KeyValue(self.key, self.value)

    def cache_for(self, backend: AttentionBackend) -> torch.Tensor:
        """A copy of the cache, each block in the backend's own order."""
        library = native_library() if backend.name == "native" else None
        return among_layers(self.kv_cache if library is None else in_kernel_order(library, self.kv_cache))

    def kv_for(self, backend: AttentionBackend) -> LayerKv:
        """``cache_for`` with a copy of its scales."""
        return LayerKv(self.cache_for(backend), None if self.kv_scales is None else among_layers(self.kv_scales))

    def expected(self) -> torch.Tensor:
        """Output (N, heads, head_dim) in float32: token by token, head by head."""
        shape, out = self.shape, torch.zeros(self.query.shape)
        group = shape.num_heads // shape.num_kv_heads
        token = 0
        for request, query_len in enumerate(self.metadata.host_query_lens.tolist()):
            seq_len = int(self.metadata.host_seq_lens[request])
            for position in range(seq_len - query_len, seq_len):
                if seq_len:
                    first = 0 if shape.sliding_window is None else max(0, position - shape.sliding_window + 1)
                    for head in range(shape.num_heads):
                        keys = self.all_keys[request][first : position + 1, head // group].float().cpu()
                        values = self.all_values[request][first : position + 1, head // group].float().cpu()
                        scores = keys @ self.query[token, head].float().cpu() * shape.scale
                        if shape.softcap is not None:
                            scores = shape.softcap * torch.tanh(scores / shape.softcap)
                        largest = scores.max()
                        weights, sunk = (scores - largest).exp(), torch.zeros(())
                        if shape.sinks is not None:
                            sunk = (shape.sinks[head].cpu() - largest).exp()
                        out[token, head] = weights / (weights.sum() + sunk) @ values
                token += 1
        return out


def among_layers(states: torch.Tensor) -> torch.Tensor:
    """A copy of one layer's cache or scales (2, blocks, ...) as a pool has it: between other layers, here all NaN."""
    blocks = states.new_zeros((states.shape[1], 3, *states[:, 0].shape))
    if states.dtype.is_floating_point:
        blocks = torch.full(blocks.shape, torch.nan, device=states.device).to(states.dtype)
    layer_view(blocks, 1).copy_(states)
    return layer_view(blocks, 1)


def make_batch(
    requests: list[tuple[int, int]],
    shape: AttentionShape,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    padding_tokens: int = 0,
    consecutive_blocks: bool = False,
    seed: int = 0,
) -> PagedBatch:
    """A step of ``requests`` (query_len, seq_len); (1, 0) is padding.  Memory that no request owns is NaN."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*requests, strict=True))
    num_blocks_each = -(-seq_lens // block_size)
    num_blocks = int(num_blocks_each.sum()) + 3
    free = np.arange(num_blocks) if consecutive_blocks else rng.permutation(num_blocks)
    table = np.zeros((len(requests), max(1, int(num_blocks_each.max()))), dtype=np.int32)
    cache_dtype = cache_dtype or dtype
    kv_cache = torch.full((2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim), float("nan"))
    kv_cache = kv_cache.to(dtype if is_quantised(cache_dtype) else cache_dtype)
    flat = kv_cache.view(2, -1, shape.num_kv_heads, shape.head_dim)
    all_kv, new_kv, slots = [], [], []
    for request, (query_len, seq_len) in enumerate(requests):
        count = int(num_blocks_each[request])
        table[request, :count], free = free[:count], free[count:]
        kv = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
        own_slots = slots_for(table[request : request + 1], np.zeros(seq_len, np.int64), np.arange(seq_len), block_size)
        cached = max(0, seq_len - query_len)
        flat[:, own_slots[:cached]] = kv[:, :cached].to(kv_cache.dtype)
        all_kv.append(kv)
        new_kv.append(kv[:, cached:] if seq_len else torch.randn(2, query_len, *kv.shape[2:], generator=generator))
        slots.append(own_slots[cached:] if seq_len else np.full(query_len, PAD_SLOT))
    slots.append(np.full(padding_tokens, PAD_SLOT))
    new_kv.append(torch.randn(2, padding_tokens, shape.num_kv_heads, shape.head_dim, generator=generator))
    kv_scales = None
    if is_quantised(cache_dtype):
        kv_cache, scales = quantise(kv_cache, cache_dtype)
        kv_scales = among_layers(scales.transpose(2, 3).to(device))
    key, value = torch.cat([kv.to(dtype) for kv in new_kv], dim=1).to(device)
    query = torch.randn(key.shape[0], shape.num_heads, shape.head_dim, generator=generator).to(dtype)
    metadata = AttentionMetadata(
        num_decodes=next((i for i, (query_len, _) in enumerate(requests) if query_len != 1), len(requests)),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        block_table=torch.from_numpy(table).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        query_start=torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)).to(device),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
    )
    return PagedBatch(
        metadata=metadata,
        shape=shape,
        kv_cache=among_layers(kv_cache.to(device)),
        query=query.to(device),
        key=key,
        value=value,
        all_keys=[kv[0] for kv in all_kv],
        all_values=[kv[1] for kv in all_kv],
        kv_scales=kv_scales,
    )
