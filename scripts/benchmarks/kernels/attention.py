"""Attention for ``bench_kernels``: decodes, which read the cache, and prompts, which compute."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.cases import KernelCase, Launch, Shape, can_use, random_cache, short_name
from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.ops import implementation


def decode_bytes(shape: Shape, num_requests: int, length: int, cache_dtype: torch.dtype) -> int:
    """Bytes of all keys, values, scales, the block table and the queries (in) and of the results (out)."""
    scale_bytes = 4 if cache_dtype.itemsize == 1 else 0
    per_token = 2 * shape.num_kv_heads * (shape.head_dim * cache_dtype.itemsize + scale_bytes)
    table = -(-length // shape.block_size) * 4
    return num_requests * (length * per_token + table + 2 * shape.num_heads * shape.head_bytes)


def prefill_flops(shape: Shape, num_tokens: int) -> int:
    """Two products over the causal half of (tokens, tokens) and head_dim; each has a multiplication and an addition."""
    return 2 * 2 * shape.num_heads * shape.head_dim * (num_tokens * (num_tokens + 1) // 2)


def attention_cases(shape: Shape, num_requests: int, length: int) -> Iterator[KernelCase]:
    """A decode of ``num_requests`` requests of ``length`` tokens each, for every type of cache."""
    for cache_dtype in (shape.dtype, torch.float8_e4m3fn, torch.int8):
        if can_use(cache_dtype, shape.device):
            yield KernelCase(
                kernel=f"decode attention ({short_name(cache_dtype)})",
                size=f"{num_requests} x {length}",
                num_bytes=decode_bytes(shape, num_requests, length, cache_dtype),
                make=partial(_launch, shape, [1] * num_requests, length, cache_dtype),
            )


def prefill_cases(shape: Shape, num_tokens: int) -> Iterator[KernelCase]:
    """One prompt of ``num_tokens``."""
    num_bytes = decode_bytes(shape, 1, num_tokens, shape.dtype) + 2 * num_tokens * shape.num_heads * shape.head_bytes
    yield KernelCase(
        kernel=f"prefill attention ({short_name(shape.dtype)})",
        size=f"{num_tokens} tokens",
        num_bytes=num_bytes,
        num_flops=prefill_flops(shape, num_tokens),
        make=partial(_launch, shape, [num_tokens], num_tokens, shape.dtype),
    )


# DeepSeek V3's latent attention, on one rank and on 8: elements of a row and of its latent, heads.
LATENT_ROW, LATENT_RANK, LATENT_HEADS = 576, 512, (128, 16)
# The indexer of V3.2: heads, elements of a head, chosen keys.
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048


def latent_bytes(shape: Shape, num_heads: int, num_requests: int, length: int) -> int:
    """Bytes of all rows, the block table and the queries (in) and of the results (out)."""
    table, states = -(-length // shape.block_size) * 4, num_heads * (LATENT_ROW + LATENT_RANK) * shape.dtype.itemsize
    return num_requests * (length * LATENT_ROW * shape.dtype.itemsize + table + states)


def latent_cases(shape: Shape, num_requests: int, length: int) -> Iterator[KernelCase]:
    """The same for latent attention's absorbed queries; with many heads its products take longer than its bytes."""
    for num_heads in LATENT_HEADS:
        yield KernelCase(
            kernel=f"latent decode attention, {num_heads} heads",
            size=f"{num_requests} x {length}",
            num_bytes=latent_bytes(shape, num_heads, num_requests, length),
            num_flops=2 * num_requests * length * num_heads * (LATENT_ROW + LATENT_RANK),
            make=partial(_launch_latents, shape, num_heads, num_requests, length),
        )


def _launch_latents(shape: Shape, num_heads: int, num_requests: int, length: int, top_k: int | None = None) -> Launch:
    """Attention to all keys, or to ``top_k`` of each request, at random."""
    metadata = _metadata(shape, [1] * num_requests, length)
    num_blocks = metadata.block_table.numel()
    cache = torch.randn(1, num_blocks, shape.block_size, 1, LATENT_ROW, device=shape.device, dtype=shape.dtype)
    query = torch.randn(num_requests, num_heads, LATENT_ROW, device=shape.device).to(shape.dtype)
    attention = AttentionShape(
        num_heads=num_heads, num_kv_heads=1, head_dim=LATENT_ROW, scale=LATENT_ROW**-0.5, value_dim=LATENT_RANK
    )
    backend = TritonMLABackend()
    backend.prepare(metadata)
    if top_k is None:
        return lambda: backend.forward(query, None, LayerKv(cache), metadata, attention)
    positions = torch.rand(num_requests, length, device=shape.device).topk(top_k).indices.sort().values.int()
    chosen = ChosenKeys(positions, torch.full((num_requests,), top_k, dtype=torch.int32, device=shape.device))
    return lambda: backend.forward_chosen(query, None, LayerKv(cache), chosen, attention)


def sparse_cases(shape: Shape, num_requests: int, length: int, top_k: int = TOP_K) -> Iterator[KernelCase]:
    """DeepSeek's sparse attention beside ``latent_cases``, which attend to all keys: the choice, and attention to the
    chosen ones.  None if all keys are chosen."""
    if length <= top_k:
        return
    size, states = f"{num_requests} x {length}", INDEX_HEADS * (INDEX_DIM * shape.dtype.itemsize + 4)
    table = -(-length // shape.block_size) * 4
    yield KernelCase(
        kernel="choice of keys for latent attention",
        size=size,
        num_bytes=num_requests * (length * INDEX_DIM * shape.dtype.itemsize + states + table + top_k * 4),
        num_flops=2 * num_requests * length * INDEX_HEADS * INDEX_DIM,
        make=partial(_launch_choice, shape, num_requests, length, top_k),
    )
    for num_heads in LATENT_HEADS:
        yield KernelCase(
            kernel=f"latent decode attention to chosen keys, {num_heads} heads",
            size=size,
            num_bytes=latent_bytes(shape, num_heads, num_requests, top_k) + num_requests * top_k * 4,
            num_flops=2 * num_requests * top_k * num_heads * (LATENT_ROW + LATENT_RANK),
            make=partial(_launch_latents, shape, num_heads, num_requests, length, top_k),
        )


def _launch_choice(shape: Shape, num_requests: int, length: int, top_k: int) -> Launch:
    metadata, device = _metadata(shape, [1] * num_requests, length), shape.device
    num_blocks = metadata.block_table.numel()
    keys = torch.randn(1, num_blocks, shape.block_size, 1, INDEX_DIM, device=device, dtype=shape.dtype)
    queries = torch.randn(num_requests, INDEX_HEADS, INDEX_DIM, device=device).to(shape.dtype)
    given = queries, torch.randn(num_requests, INDEX_HEADS, device=device), 0.01, LayerKv(keys), metadata.block_table
    choose = implementation("choose_keys", "triton")
    return lambda: choose(*given, metadata.seq_lens, top_k)


def _launch(shape: Shape, query_lens: list[int], length: int, cache_dtype: torch.dtype) -> Launch:
    """Attention of requests of ``length`` tokens each; their K/V is already stored."""
    metadata = _metadata(shape, query_lens, length)
    cache, scales = random_cache(shape, metadata.block_table.numel(), cache_dtype)
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, device=shape.device).to(shape.dtype)
    attention = AttentionShape(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, scale=shape.head_dim**-0.5
    )
    backend = TritonBackend()
    backend.prepare(metadata)
    return lambda: backend.forward(query, None, LayerKv(cache, scales), metadata, attention)


def _metadata(shape: Shape, query_lens: list[int], length: int) -> AttentionMetadata:
    """Requests of ``length`` tokens each, whose blocks are all blocks of a cache, at random."""
    device, count, num_columns = shape.device, len(query_lens), -(-length // shape.block_size)
    table = torch.randperm(count * num_columns, device=device).to(torch.int32).view(count, num_columns)
    host_query_lens = np.array(query_lens, dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(host_query_lens))).astype(np.int32)
    return AttentionMetadata(
        num_decodes=int((host_query_lens == 1).sum()),
        slot_mapping=torch.full((int(query_start[-1]),), -1, dtype=torch.int64, device=device),
        block_table=table,
        seq_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        query_start=torch.from_numpy(query_start).to(device),
        host_query_lens=host_query_lens,
        host_seq_lens=np.full(count, length, dtype=np.int32),
        is_padded=False,
    )
