"""The small operations in C beside their PyTorch twins, on small inputs: a part of ``self_check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch

from tp_engine.kernels import activation, embedding, head_width, logits, norm, rope
from tp_engine.kernels.native.ops import NativeOps
from tp_engine.kernels.norm import NormRule
from tp_engine.kernels.rope import HeadNorm, Rotation
from tp_engine.model_config.activation import Activation, ActivationKind

ACTIVATIONS = tuple(Activation(kind) for kind in get_args(ActivationKind))
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 24


def check_ops(
    ops: NativeOps, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, results and their twins' results."""
    yield from _rows(ops, dtype, generator)
    yield from _heads(ops, dtype, generator)


def _rows(
    ops: NativeOps, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What is done row by row."""
    x, residual = torch.randn(2, 3, 40, generator=generator).to(dtype)
    weight = torch.randn(40, generator=generator).to(dtype)
    for rule in (NormRule(weight, 1e-5), NormRule(weight, 1e-5, offset=1.0, is_centred=True)):
        yield "norm", ops.norm(x, rule), norm.norm(x, rule)
        found, expected = residual.clone(), residual.clone()
        yield "add_norm", ops.add_norm(x, found, rule, 0.5), norm.add_norm(x, expected, rule, 0.5)
        yield "add_norm", found, expected
        ops.add(x, found, 0.25)
        norm.add(x, expected, 0.25)
        yield "add", found, expected
    for kind in ACTIVATIONS:
        yield f"gate by {kind.kind}", ops.gate(x, kind), activation.gate(x, kind)
    ids = torch.tensor([1, 4, 2], dtype=torch.int32)
    yield "embed", ops.embed(ids, x, 1, 3.0), embedding.embed(ids, x, 1, 3.0)
    for cap in (None, 2.0):
        found, expected = x * 3, x * 3
        ops.cap_logits(found, 0.5, cap)
        logits.cap_logits(expected, 0.5, cap)
        yield "cap_logits", found, expected


def _heads(
    ops: NativeOps, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What is done to queries and keys."""
    heads = torch.randn(3, _HEADS + 2 * _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    weights = torch.randn(_HEADS + _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    head_norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=1e-5, offset=1.0)
    positions, scale = torch.tensor([4, 0, 2]), torch.rand(5, generator=generator) + 0.5
    tables = [torch.randn(5, size, generator=generator).to(dtype) for size in (_HEAD_DIM, 10)]
    for own_norm, rotation in (
        (None, Rotation(tables[0], positions)),
        (head_norm, Rotation(tables[1], positions, scale)),
    ):
        arguments = (_KV_HEADS, own_norm, rotation, None, positions)
        found, expected = ops.prepare_heads(heads.clone(), *arguments), rope.prepare_heads(heads, *arguments)
        for one, twin in zip(found, expected, strict=True):
            assert one is not None and twin is not None
            yield "prepare_heads", one, twin
    counts = (_HEADS, _KV_HEADS)
    squares = head_width.head_squares(heads, *counts)
    yield "head_squares", ops.head_squares(heads, *counts), squares
    widths = (_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM)
    own, other = heads.clone(), heads.clone()
    ops.norm_width(own, *counts, squares, weights, widths, 1e-5)
    head_width.norm_width(other, *counts, squares, weights, widths, 1e-5)
    yield "norm_width", own, other
