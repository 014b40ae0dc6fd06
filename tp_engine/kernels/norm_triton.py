"""Normalisation in one pass over memory: the Triton twins of ``norm``, ``add_norm`` and ``add`` in ``layer_ops``.

One program holds one token's row, so it is read once: x, and the residual if there is one, which becomes their sum.
The sum is rounded to the residual's type before it is normalised, as the twin does.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    begin_row_block,
    dependent_launch,
    launch_row_blocks,
    let_next_begin,
    wait_for_previous,
)
from tp_engine.kernels.jit import jit
from tp_engine.kernels.layer_ops import NormRule

MAX_SIZE = 1 << 16
_ELEMENTS_PER_THREAD = 8
_MAX_WARPS = 16


@jit
def begin_norm(weight, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr):
    """Begin a program that normalises one row: the row, its columns, which of them are below SIZE, and their weights,
    float32, which are loaded before the wait."""
    let_next_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = load_gain(weight, column, inside, OFFSET)
    wait_for_previous(PDL)
    return token, column, inside, gain


@jit
def load_gain(weight, column, inside, OFFSET: tl.constexpr):
    """The weights of a row, float32."""
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        gain += OFFSET
    return gain


@jit
def normalised(values, gain, inside, eps, SIZE: tl.constexpr, CENTRED: tl.constexpr):
    """``values`` normalised: SIZE elements, float32, then zeros."""
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return values * scale * gain


@jit
def normalised_row(
    x, residual, gain, token, column, inside, x_stride, residual_stride, eps, stream_scale,
    SIZE: tl.constexpr, ADDS: tl.constexpr, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """The row ``token`` normalised, in float32; with ADDS, SCALE times the row is added to the residual first, and with
    SCALES_STREAM the sum is multiplied by ``stream_scale``, which differs between layers."""
    if ADDS:
        rounded = added_to_stream(
            x + token * x_stride, residual + token * residual_stride, column, inside, stream_scale, SCALE, SCALES_STREAM
        )
        values = rounded.to(tl.float32)
    else:
        values = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    return normalised(values, gain, inside, eps, SIZE, CENTRED)


@jit
def added_to_stream(x, residual, column, inside, stream_scale, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr):
    """Add a row to the residual stream's; return the sum as it is stored."""
    return add_values(
        tl.load(x + column, mask=inside, other=0.0), residual, column, inside, stream_scale, SCALE, SCALES_STREAM
    )


@jit
def add_values(values, residual, column, inside, stream_scale, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr):
    """``added_to_stream`` of a row that has been loaded."""
    values = values.to(tl.float32)
    if SCALE != 1:
        values *= SCALE
    values += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
    if SCALES_STREAM:
        values *= stream_scale
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + column, rounded, mask=inside)
    return rounded


@jit
def norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, eps, stream_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row of SIZE elements."""
    token, column, inside, gain = begin_norm(weight, SIZE, BLOCK, OFFSET, PDL)
    result = normalised_row(
        x, residual, gain, token, column, inside, x_stride, residual_stride, eps, stream_scale, SIZE, ADDS, SCALE,
        SCALES_STREAM, CENTRED,
    )  # fmt: skip
    tl.store(out + token * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


@jit
def add_kernel(
    x, residual, x_stride, residual_stride, stream_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK elements of one row."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    added_to_stream(
        x + token * x_stride, residual + token * residual_stride, column, inside, stream_scale, SCALE, SCALES_STREAM
    )


def norm_triton(x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    """``layer_ops.norm``; the rows of ``x`` may be slices of wider ones."""
    return _launch(x, None, rule, 1.0, 1.0)


def add_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, rule: NormRule, scale: float = 1.0, stream_scale: float = 1.0
) -> torch.Tensor:
    """``layer_ops.add_norm``, which reads and writes every element once."""
    assert residual.shape == x.shape and residual.stride(1) == 1, (residual.shape, residual.stride())
    return _launch(x, residual, rule, scale, stream_scale)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, rule: NormRule, scale: float, stream_scale: float
) -> torch.Tensor:
    num_tokens, size = x.shape
    assert x.stride(1) == 1, (x.shape, x.stride())
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    norm_kernel[(num_tokens,)](
        x, residual, rule.weight, out, x.stride(0), 0 if residual is None else residual.stride(0), rule.eps,
        float(stream_scale),
        ADDS=residual is not None, SCALE=scale, SCALES_STREAM=stream_scale != 1.0, **row_constants(size, rule),
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


def add_triton(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0, stream_scale: float = 1.0) -> None:
    """``layer_ops.add``; the rows of both may be slices of wider ones."""
    num_tokens, size = x.shape
    assert residual.shape == x.shape and x.stride(1) == residual.stride(1) == 1, (residual.shape, residual.stride())
    arguments = x, residual, x.stride(0), residual.stride(0), float(stream_scale)
    launch_row_blocks(add_kernel, x, num_tokens, size, *arguments, SCALE=scale, SCALES_STREAM=stream_scale != 1.0)


def row_constants(size: int, rule: NormRule) -> dict[str, Any]:
    """The constants of a kernel in which each program normalises a row of ``size`` elements at a time."""
    assert rule.weight.shape == (size,) and rule.weight.is_contiguous(), (rule.weight.shape, size)
    assert size <= MAX_SIZE, f"rows of {size} elements; one program holds at most {MAX_SIZE}"
    block = int(triton.next_power_of_2(size))
    return {
        "SIZE": size,
        "BLOCK": block,
        "OFFSET": rule.offset,
        "CENTRED": rule.is_centred,
        "num_warps": min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS),
    }
