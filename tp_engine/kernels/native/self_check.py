"""Whether compiled kernels compute what their PyTorch twins do, before anything depends on them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from tp_engine.kernels import activation, norm, rope
from tp_engine.kernels.int8_rows import TorchInt8Rows
from tp_engine.kernels.native.int8_rows import NativeInt8Rows
from tp_engine.kernels.native.layout import DTYPE_CODES
from tp_engine.kernels.native.linear import PackedWeight
from tp_engine.kernels.native.ops import NativeOps
from tp_engine.kernels.native.paged_attention import PagedAttention, in_kernel_order
from tp_engine.kernels.norm import NormRule
from tp_engine.model_config.activation import SILU

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 4, 2, 24, 4
# (queries, keys) of each request.
_REQUESTS = ((1, 9), (3, 40))


def disagreement(library: ctypes.CDLL) -> str | None:
    """What a kernel of ``library`` gets wrong on small inputs, or None.  Takes a few milliseconds."""
    ops = NativeOps(library)
    for dtype in DTYPE_CODES:
        generator = torch.Generator().manual_seed(0)
        for name, found, expected in (
            *_small_operations(ops, dtype, generator),
            *_linear(library, dtype, generator),
            ("paged_attention", *_attention(library, dtype, generator)),
            *_int8_rows(NativeInt8Rows(library), dtype, generator),
        ):
            tolerance = 16 * torch.finfo(dtype).eps
            if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return f"{name} in {dtype} differs from PyTorch"
    return None


def _small_operations(
    ops: NativeOps, dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, results and their twins' results."""
    x, residual = torch.randn(2, 3, 40, generator=generator).to(dtype)
    rule = NormRule(torch.randn(40, generator=generator).to(dtype), 1e-5)
    heads = torch.randn(3, _HEADS + 2 * _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    rotation = rope.Rotation(torch.randn(5, _HEAD_DIM, generator=generator).to(dtype), torch.tensor([4, 0, 2]))
    slots = torch.arange(3)
    turned = ops.prepare_heads(heads.clone(), _KV_HEADS, None, rotation, None, slots)
    expected = rope.prepare_heads(heads, _KV_HEADS, None, rotation, None, slots)
    pairs = [(a, b) for a, b in zip(turned, expected, strict=True) if a is not None and b is not None]
    return [
        ("norm", ops.norm(x, rule), norm.norm(x, rule)),
        ("add_norm", ops.add_norm(x, residual.clone(), rule), norm.add_norm(x, residual.clone(), rule)),
        ("gate", ops.gate(x, SILU), activation.gate(x, SILU)),
        ("prepare_heads", torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1)),
    ]


def _linear(
    library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Seven rows times a weight whose sizes are no multiples of much, and the same by PyTorch, in float64: its own
    float32 is off by more than ours on some processors."""
    shapes = ((7, 86), (37, 86), (37,))
    x, weight, bias = ((torch.randn(*shape, generator=generator) / 3).to(dtype) for shape in shapes)
    expected = F.linear(x.double(), weight.double(), bias.double())
    gated = PackedWeight(library, weight[:36], activation=SILU).product(x, bias[:36])
    return [
        ("packed_linear", PackedWeight(library, weight).product(x, bias), expected),
        ("gated packed_linear", gated, activation.gate(expected[:, :36], SILU)),
    ]


def _int8_rows(
    rows: NativeInt8Rows, dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, results and their twins' results, of numbers that are codes already, so that none lies between two."""
    twin = TorchInt8Rows()
    x = torch.randint(-127, 128, (3, 40), generator=generator).to(dtype)
    x[:, 7] = -127
    products, bias = torch.randn(3, 40, generator=generator), torch.randn(40, generator=generator).to(dtype)
    (codes, scales), (expected, expected_scales) = rows.quantise(x), twin.quantise(x)
    found = rows.scale(products, scales, bias, dtype)
    return [
        ("quantise_rows", codes, expected),
        ("quantise_rows", scales, expected_scales),
        ("scale_rows", found, twin.scale(products, expected_scales, bias, dtype)),
    ]


def _attention(
    library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of two requests in scattered blocks, and the same by softmax over explicit scores."""
    query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*_REQUESTS, strict=True))
    num_tokens, num_blocks = int(query_lens.sum()), 14
    blocks = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    table = torch.zeros(2, 10, dtype=torch.int32)
    table[0, :3], table[1, :10] = blocks[:3], blocks[3:13]
    kv_cache = torch.randn(2, num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    query = torch.randn(num_tokens, _HEADS, _HEAD_DIM, generator=generator).to(dtype)
    out = torch.empty_like(query)
    starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
    attention = PagedAttention(library)
    attention.set_step(query_lens, starts, seq_lens, table, torch.full((num_tokens,), -1))
    attention(query, None, in_kernel_order(library, kv_cache), out, scale=0.2)
    expected = [
        _attend_plainly(query[start : start + length], kv_cache[:, row.long()].flatten(1, 2)[:, :total])
        for start, length, total, row in zip(starts, query_lens, seq_lens, table, strict=True)
    ]
    return out, torch.cat(expected)


def _attend_plainly(query: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
    """``query`` (n, heads, head_dim), the last of ``keys_values`` (2, tokens, KV heads, head_dim); in float32."""
    keys, values = keys_values.float().repeat_interleave(_HEADS // _KV_HEADS, 2)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * 0.2
    num_queries, num_keys = len(query), len(keys)
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
