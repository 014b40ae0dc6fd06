"""Cases of ``bench_kernels``: the layers' small operations and the inputs of decode steps.

Bytes are the minimum for the operation: each input read once, each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

Launch = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one decoder layer on one rank, and of its cache."""

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
    """One kernel at one size.  ``make`` allocates its tensors and returns a function that launches it on them.
    ``num_flops`` is set if arithmetic limits the kernel."""

    kernel: str
    size: str
    num_bytes: int
    make: Callable[[], Launch]
    num_flops: int = 0


def norm_bytes(shape: Shape, num_tokens: int, *, adds: bool) -> int:
    """Bytes of the rows (in and out), the residual (in and out, if any) and the weight."""
    rows = 4 if adds else 2
    return (rows * num_tokens + 1) * shape.hidden * shape.dtype.itemsize


def silu_bytes(shape: Shape, num_tokens: int) -> int:
    """Bytes of gate and up (in) and of their product (out)."""
    return 3 * num_tokens * shape.inner * shape.dtype.itemsize


def heads_bytes(shape: Shape, num_tokens: int, cache_dtype: torch.dtype) -> int:
    """Bytes of the merged row and its angles (in), the queries (out), and keys, values and scales (to the cache)."""
    kv = 2 * shape.num_kv_heads
    scales = 4 * kv if cache_dtype.itemsize == 1 else 0
    read = (shape.num_heads + kv + 1) * shape.head_bytes + 2 * 8
    written = shape.num_heads * shape.head_bytes + kv * shape.head_dim * cache_dtype.itemsize + scales
    return num_tokens * (read + written)


def decode_inputs_bytes(shape: Shape, num_requests: int, length: int) -> int:
    """For each request: row, length and token (in), four values (out), the used part of the block table (both)."""
    return num_requests * (3 * 4 + 4 + 8 + 8 + 4 + 2 * 4 * (-(-length // shape.block_size)))


def token_cases(shape: Shape, num_tokens: int) -> Iterator[KernelCase]:
    """The layers' small operations on ``num_tokens`` tokens."""
    from tp_engine.kernels.layer_ops import NormRule
    from tp_engine.kernels.ops import op
    from tp_engine.model_config.mlp import SILU

    norm, add_norm, gate = (op(name, "cuda") for name in ("norm", "add_norm", "gate"))
    size = f"{num_tokens} tokens"

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=shape.device).to(shape.dtype)

    def rms_norm() -> Launch:
        x, rule = randn(num_tokens, shape.hidden), NormRule(randn(shape.hidden), 1e-6)
        return lambda: norm(x, rule)

    def add_rms_norm() -> Launch:
        x, residual = randn(num_tokens, shape.hidden), randn(num_tokens, shape.hidden)
        rule = NormRule(randn(shape.hidden), 1e-6)
        return lambda: add_norm(x, residual, rule)

    def silu_and_mul() -> Launch:
        gate_up = randn(num_tokens, 2 * shape.inner)
        return lambda: gate(gate_up, SILU)

    yield KernelCase(kernel="rms_norm", size=size, num_bytes=norm_bytes(shape, num_tokens, adds=False), make=rms_norm)
    yield KernelCase(
        kernel="add_rms_norm", size=size, num_bytes=norm_bytes(shape, num_tokens, adds=True), make=add_rms_norm
    )
    yield KernelCase(kernel="silu_and_mul", size=size, num_bytes=silu_bytes(shape, num_tokens), make=silu_and_mul)
    for cache_dtype in (shape.dtype, torch.float8_e4m3fn, torch.int8):
        if not can_use(cache_dtype, shape.device):
            continue
        yield KernelCase(
            kernel=f"norm, rope, store ({short_name(cache_dtype)})",
            size=size,
            num_bytes=heads_bytes(shape, num_tokens, cache_dtype),
            make=partial(_heads_launch, shape, num_tokens, cache_dtype),
        )


def _heads_launch(shape: Shape, num_tokens: int, cache_dtype: torch.dtype) -> Launch:
    from tp_engine.kernels.attention.heads import HeadNorm, Rotation
    from tp_engine.kernels.kv_cache.layer_kv import LayerKv
    from tp_engine.kernels.ops import op

    num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    heads = torch.randn(num_tokens, shape.num_heads + 2 * num_kv_heads, head_dim, device=shape.device).to(shape.dtype)
    q_weight, k_weight = torch.ones(2, head_dim, dtype=shape.dtype, device=shape.device)
    weights = torch.ones(shape.num_heads + num_kv_heads, head_dim, dtype=shape.dtype, device=shape.device)
    norm = HeadNorm(q_weight=q_weight, k_weight=k_weight, weights=weights, eps=1e-6)
    table = torch.randn(4096, head_dim, device=shape.device).to(shape.dtype)
    rotation = Rotation(table, torch.randint(4096, (num_tokens,), device=shape.device))
    num_blocks = -(-num_tokens // shape.block_size)
    cache, scales = random_cache(shape, num_blocks, cache_dtype)
    slots = torch.randperm(num_blocks * shape.block_size, device=shape.device)[:num_tokens]
    prepare, kv = op("qk_norm_rope_store", "cuda"), LayerKv(cache, scales)
    return lambda: prepare(heads, num_kv_heads, norm, rotation, kv, slots)


def decode_input_cases(shape: Shape, num_requests: int, length: int) -> Iterator[KernelCase]:
    """Preparing and advancing the inputs of a decode step of ``num_requests`` requests of ``length`` tokens each."""
    size = f"{num_requests} x {length}"
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


def _decode_inputs_launch(shape: Shape, num_requests: int, length: int, *, advances: bool) -> Launch:
    from tp_engine.kernels.ops import op
    from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables

    num_columns = -(-length // shape.block_size)
    tables = RowTables(
        token_ids=torch.zeros(num_requests, 2 * length + 1024, dtype=torch.int32, device=shape.device),
        num_computed=torch.full((num_requests,), length - 1, dtype=torch.int32, device=shape.device),
        block_table=torch.zeros(1, num_requests, num_columns, dtype=torch.int32, device=shape.device),
        block_size=shape.block_size,
    )
    inputs = DecodeInputs.allocate(num_requests, tables)
    prepare, advance = op("prepare_decodes", "cuda"), op("advance_decodes", "cuda")
    inputs.rows.copy_(torch.randperm(num_requests))
    if not advances:
        return lambda: prepare(tables, inputs)
    sampled = torch.zeros(num_requests, dtype=torch.int32, device=shape.device)
    return lambda: advance(tables, inputs, sampled)


def random_cache(shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A random cache, and its scales if it is quantised."""
    sizes = (num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    if dtype.itemsize > 1:
        return torch.randn(sizes, device=shape.device, dtype=dtype).transpose(0, 1), None
    values = torch.randint(-100, 100, sizes, dtype=torch.int8, device=shape.device).transpose(0, 1)
    scales = torch.rand(num_blocks, 2, shape.num_kv_heads, shape.block_size, device=shape.device).transpose(0, 1)
    return values if dtype == torch.int8 else values.to(torch.bfloat16).to(dtype), scales


def can_use(cache_dtype: torch.dtype, device: str) -> bool:
    """Whether kernels can convert to this type: 8-bit floats need compute capability 8.9."""
    if cache_dtype != torch.float8_e4m3fn or device != "cuda":
        return True
    return torch.cuda.get_device_capability() >= (8, 9)


def short_name(dtype: torch.dtype) -> str:
    """The type's name on the command line."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
