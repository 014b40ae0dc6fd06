"""What ``bench_kernels`` times: every kernel of a decoder layer and of the decode step, with the bytes it has to move.

Bytes are the least that the operation needs: each input read once, each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Launch = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One decoder layer on one rank, and what its cache is made of."""

    name: str
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    device: str = "cuda"

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel at one size.  ``make`` allocates its tensors and returns what launches it on them."""

    kernel: str
    size: str
    num_bytes: int
    make: Callable[[], Launch]


def norm_bytes(shape: Shape, num_tokens: int, *, adds: bool) -> int:
    """Rows in and out, the residual in and out where there is one, and the weight."""
    rows = 4 if adds else 2
    return (rows * num_tokens + 1) * shape.hidden * shape.dtype.itemsize


def silu_bytes(shape: Shape, num_tokens: int) -> int:
    """Gate and up in, their product out."""
    return 3 * num_tokens * shape.inner * shape.dtype.itemsize


def heads_bytes(shape: Shape, num_tokens: int, cache_dtype: torch.dtype) -> int:
    """The merged row and its angles in; queries back; keys and values, with scales if quantised, to the cache."""
    kv = 2 * shape.num_kv_heads
    scales = 4 * kv if cache_dtype.itemsize == 1 else 0
    read = (shape.num_heads + kv + 1) * shape.head_bytes + 2 * 8
    written = shape.num_heads * shape.head_bytes + kv * shape.head_dim * cache_dtype.itemsize + scales
    return num_tokens * (read + written)


def decode_attention_bytes(shape: Shape, num_requests: int, length: int, cache_dtype: torch.dtype) -> int:
    """All keys and values with their scales and the block table in; queries in, results out."""
    per_token = (
        2 * shape.num_kv_heads * (shape.head_dim * cache_dtype.itemsize + (4 if cache_dtype.itemsize == 1 else 0))
    )
    table = -(-length // shape.block_size) * 4
    return num_requests * (length * per_token + table + 2 * shape.num_heads * shape.head_bytes)


def decode_inputs_bytes(shape: Shape, num_requests: int, length: int) -> int:
    """Per request: row, length and token in, four values out, and the used part of the block table in and out."""
    return num_requests * (3 * 4 + 4 + 8 + 8 + 4 + 2 * 4 * (-(-length // shape.block_size)))


def token_cases(shape: Shape, num_tokens: int) -> Iterator[KernelCase]:
    """The layers' small operations on ``num_tokens`` tokens."""
    from tp_engine.kernels.layer_ops import layer_ops

    ops, size = layer_ops("cuda"), f"{num_tokens} tokens"

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=shape.device).to(shape.dtype)

    def rms_norm() -> Launch:
        x, weight = randn(num_tokens, shape.hidden), randn(shape.hidden)
        return lambda: ops.rms_norm(x, weight, 1e-6)

    def add_rms_norm() -> Launch:
        x, residual, weight = randn(num_tokens, shape.hidden), randn(num_tokens, shape.hidden), randn(shape.hidden)
        return lambda: ops.add_rms_norm(x, residual, weight, 1e-6)

    def silu_and_mul() -> Launch:
        gate_up = randn(num_tokens, 2 * shape.inner)
        return lambda: ops.silu_and_mul(gate_up)

    yield KernelCase(kernel="rms_norm", size=size, num_bytes=norm_bytes(shape, num_tokens, adds=False), make=rms_norm)
    yield KernelCase(
        kernel="add_rms_norm", size=size, num_bytes=norm_bytes(shape, num_tokens, adds=True), make=add_rms_norm
    )
    yield KernelCase(kernel="silu_and_mul", size=size, num_bytes=silu_bytes(shape, num_tokens), make=silu_and_mul)
    for cache_dtype in (shape.dtype, torch.float8_e4m3fn, torch.int8):
        yield KernelCase(
            kernel=f"norm, rope, store ({_short(cache_dtype)})",
            size=size,
            num_bytes=heads_bytes(shape, num_tokens, cache_dtype),
            make=lambda cache_dtype=cache_dtype: _heads_launch(shape, num_tokens, cache_dtype),
        )


def _heads_launch(shape: Shape, num_tokens: int, cache_dtype: torch.dtype) -> Launch:
    from tp_engine.kernels.layer_ops import layer_ops
    from tp_engine.kernels.rope import HeadNorm, Rotation

    num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    heads = torch.randn(num_tokens, shape.num_heads + 2 * num_kv_heads, head_dim, device=shape.device).to(shape.dtype)
    q_weight, k_weight = torch.ones(2, head_dim, dtype=shape.dtype, device=shape.device)
    weights = torch.ones(shape.num_heads + num_kv_heads, head_dim, dtype=shape.dtype, device=shape.device)
    norm = HeadNorm(q_weight=q_weight, k_weight=k_weight, weights=weights, eps=1e-6)
    table = torch.randn(4096, head_dim, device=shape.device).to(shape.dtype)
    rotation = Rotation(table, torch.randint(4096, (num_tokens,), device=shape.device))
    num_blocks = -(-num_tokens // shape.block_size)
    cache, scales = _cache(shape, num_blocks, cache_dtype)
    slots = torch.randperm(num_blocks * shape.block_size, device=shape.device)[:num_tokens]
    prepare = layer_ops("cuda").prepare_heads
    return lambda: prepare(heads, num_kv_heads, norm, rotation, cache, scales, slots)


def decode_cases(shape: Shape, num_requests: int, length: int) -> Iterator[KernelCase]:
    """A decode step of ``num_requests`` requests of ``length`` tokens each."""
    size = f"{num_requests} x {length}"
    for cache_dtype in (shape.dtype, torch.float8_e4m3fn, torch.int8):
        yield KernelCase(
            kernel=f"decode attention ({_short(cache_dtype)})",
            size=size,
            num_bytes=decode_attention_bytes(shape, num_requests, length, cache_dtype),
            make=lambda cache_dtype=cache_dtype: _attention_launch(shape, num_requests, length, cache_dtype),
        )
    yield KernelCase(
        kernel="prepare decodes",
        size=size,
        num_bytes=decode_inputs_bytes(shape, num_requests, length),
        make=lambda: _decode_inputs_launch(shape, num_requests, length, advances=False),
    )
    yield KernelCase(
        kernel="advance decodes",
        size=size,
        num_bytes=num_requests * 5 * 4,
        make=lambda: _decode_inputs_launch(shape, num_requests, length, advances=True),
    )


def _attention_launch(shape: Shape, num_requests: int, length: int, cache_dtype: torch.dtype) -> Launch:
    from tp_engine.kernels.paged_decode_triton import decode_sizes, paged_decode_triton

    num_columns = -(-length // shape.block_size)
    cache, scales = _cache(shape, num_requests * num_columns, cache_dtype)
    table = (
        torch.randperm(num_requests * num_columns, device=shape.device).to(torch.int32).view(num_requests, num_columns)
    )
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device=shape.device)
    query = torch.randn(num_requests, shape.num_heads, shape.head_dim, device=shape.device).to(shape.dtype)
    out = torch.empty_like(query)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if shape.device == "cuda" else 4
    sizes = decode_sizes(num_requests, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize, multiprocessors)
    scale = shape.head_dim**-0.5
    return lambda: paged_decode_triton(query, cache, table, seq_lens, out, scale=scale, sizes=sizes, kv_scales=scales)


def _decode_inputs_launch(shape: Shape, num_requests: int, length: int, *, advances: bool) -> Launch:
    from tp_engine.kernels.decode_inputs import DecodeInputs, RowTables, decode_ops

    num_columns = -(-length // shape.block_size)
    tables = RowTables(
        token_ids=torch.zeros(num_requests, 2 * length + 1024, dtype=torch.int32, device=shape.device),
        num_computed=torch.full((num_requests,), length - 1, dtype=torch.int32, device=shape.device),
        block_table=torch.zeros(num_requests, num_columns, dtype=torch.int32, device=shape.device),
        block_size=shape.block_size,
    )
    inputs, ops = DecodeInputs.allocate(num_requests, tables), decode_ops("cuda")
    inputs.rows.copy_(torch.randperm(num_requests))
    if not advances:
        return lambda: ops.prepare(tables, inputs)
    sampled = torch.zeros(num_requests, dtype=torch.int32, device=shape.device)
    return lambda: ops.advance(tables, inputs.rows, sampled)


def _cache(shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A random cache, and its scales if it is quantised."""
    sizes = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    if dtype.itemsize > 1:
        return torch.randn(sizes, device=shape.device, dtype=dtype), None
    values = torch.randint(-100, 100, sizes, dtype=torch.int8, device=shape.device)
    scales = torch.rand(2, num_blocks, shape.num_kv_heads, shape.block_size, device=shape.device)
    return values if dtype == torch.int8 else values.to(torch.bfloat16).to(dtype), scales


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
