"""One-shot all-reduce, residual sum and norm in one kernel, over memory that the ranks' GPUs share.

A program copies its rows into this rank's buffer, meets the same program of every other rank, adds up the rows of all
buffers in the order of ranks, and goes on with the sum in registers.  It meets the others again before it ends, so that
the buffers may be overwritten.

::

    places of meeting_triton.py    program * 2: rows are copied      program * 2 + 1: rows are read

The sum is taken in float32 and rounded to the tensors' type, then added to the residual as ``layer_ops.add_norm`` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.norm_triton import load_gain, normalised, row_constants
from tp_engine.kernels.ranks.meeting_triton import MAX_PROGRAMS, meet


@triton.jit(do_not_specialize=["rank", "num_rows"])  # type: ignore[untyped-decorator]
def reduce_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    buffers,
    signals,
    x_stride,
    residual_stride,
    num_rows,
    rank,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    CENTRED: tl.constexpr,  # noqa: N803
    WORLD_SIZE: tl.constexpr,  # noqa: N803
):
    """One program: every num_programs-th row."""
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for row in range(program, num_rows, num_programs):
        part = tl.load(x + row * x_stride + column, mask=inside)
        tl.store(own + row * SIZE + column, part, mask=inside)
    meet(signals, rank, program * 2, WORLD_SIZE)
    gain = load_gain(weight, column, inside, OFFSET)
    for row in range(program, num_rows, num_programs):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for peer in tl.static_range(WORLD_SIZE):
            rows = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(x.dtype.element_ty)), 16)
            total += tl.load(rows + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        place = residual + row * residual_stride + column
        total = total.to(x.dtype.element_ty).to(tl.float32)
        if SCALE != 1:
            total *= SCALE
        rounded = (total + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        normed = normalised(rounded.to(tl.float32), gain, inside, eps, SIZE, CENTRED)
        tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)
    meet(signals, rank, program * 2 + 1, WORLD_SIZE)


def all_reduce_add_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    rule: NormRule,
    scale: float = 1.0,
    *,
    buffers: torch.Tensor,
    signals: torch.Tensor,
    rank: int,
) -> torch.Tensor:
    """``layer_ops.add_norm`` of the sum over ranks of ``x`` (N, size); a collective.

    ``buffers`` and ``signals`` (world size,) int64 hold the addresses of the ranks' buffers, aligned to 16 elements
    with room for ``x``, and of their signals, all 0.
    """
    num_rows, size = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and residual.shape == x.shape
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    reduce_norm_kernel[(min(num_rows, MAX_PROGRAMS),)](
        x,
        residual,
        rule.weight,
        out,
        buffers,
        signals,
        x.stride(0),
        residual.stride(0),
        num_rows,
        rank,
        rule.eps,
        SCALE=scale,
        WORLD_SIZE=len(buffers),
        **row_constants(size, rule),
    )
    return out
