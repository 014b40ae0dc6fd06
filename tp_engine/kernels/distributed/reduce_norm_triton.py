"""One-shot all-reduce, residual sum and norm in one kernel, over memory that the ranks' GPUs share.

::

    rank r    its rows -> its buffer        a program has every num_programs-th row
              meet                          the rows of all ranks are there
              all buffers, in the order of ranks -> sum -> stream + sum, stored -> normed
              meet                          the buffers may be overwritten

The sum is taken in float32, in the same order on every rank, so that all have the same bits, and rounded to the rows'
type; what follows is that of ``layer_ops.add_norm``.  Programs meet as those of ``gather_triton`` do.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.distributed.gather_triton import MAX_PROGRAMS, meet
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.norm_triton import add_values, load_gain, normalised, row_constants


@triton.jit(do_not_specialize=["rank", "num_rows"])
@no_type_check
def reduce_norm_kernel(
    x, residual, weight, out, buffers, signals, x_stride, residual_stride, num_rows, rank, eps, stream_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, SCALES_STREAM: tl.constexpr, OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, WORLD_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th row of SIZE elements."""
    let_next_begin(PDL)
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = load_gain(weight, column, inside, OFFSET)
    wait_for_previous(PDL)
    own = tl.load(buffers + rank).to(tl.pointer_type(x.dtype.element_ty))
    for row in range(program, num_rows, num_programs):
        tl.store(own + row * SIZE + column, tl.load(x + row * x_stride + column, mask=inside), mask=inside)
    meet(signals, rank, program * 2, WORLD_SIZE)
    for row in range(program, num_rows, num_programs):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for peer in tl.static_range(WORLD_SIZE):
            theirs = tl.load(buffers + peer).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(theirs + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        rounded = add_values(
            total.to(x.dtype.element_ty), residual + row * residual_stride, column, inside, stream_scale, SCALE,
            SCALES_STREAM,
        )  # fmt: skip
        normed = normalised(rounded.to(tl.float32), gain, inside, eps, SIZE, CENTRED)
        tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)
    meet(signals, rank, program * 2 + 1, WORLD_SIZE)


def all_reduce_add_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    rule: NormRule,
    scale: float = 1.0,
    stream_scale: float = 1.0,
    *,
    buffers: torch.Tensor,
    signals: torch.Tensor,
    rank: int,
) -> torch.Tensor:
    """``layer_ops.add_norm`` of the ranks' sum of ``x`` (N, size); a collective.

    ``buffers`` and ``signals`` (world size,) int64 hold the addresses of the ranks' buffers, with room for ``x``, and
    of their signals, all 0.  The rows of ``x`` and ``residual`` may be slices of wider ones.
    """
    num_rows, size = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and residual.shape == x.shape, (x.stride(), residual.shape)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        reduce_norm_kernel[(min(num_rows, MAX_PROGRAMS),)](
            x, residual, rule.weight, out, buffers, signals, x.stride(0), residual.stride(0), num_rows, rank, rule.eps,
            float(stream_scale),
            SCALE=scale, SCALES_STREAM=stream_scale != 1.0, WORLD_SIZE=len(buffers), **row_constants(size, rule),
            **dependent_launch(x.device),
        )  # fmt: skip
    return out
