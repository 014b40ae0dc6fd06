"""A linear layer applied to 2 to 256 rows, as in a decode step of some requests.

::

    grid (tiles, splits)       program (t, s): BLOCK_OUT outputs of all rows, over one range of the columns

    weight (out, in)  =  [ t0,s0 | t0,s1 ]      the weight is the left factor: 64 of its rows fill a matrix unit, and
                         [ t1,s0 | t1,s1 ]      x^T, 8 columns or more, is the right one, so few rows waste nothing

    parts (tiles, splits, BLOCK_OUT, ROWS) float32        of gate and up two
    arrivals (tiles,)     splits that have written their part; the last to arrive adds up the parts, in their order

Few rows take as long as reading the weight.  So the columns are split until the programs fill the GPU, and the first
columns of a program's weight are on their way before the kernel that makes ``x`` has ended
(``dependent_launch_triton``).
"""

from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.dependent_launch_triton import (
    LINE_BYTES,
    dependent_launch,
    let_next_begin,
    prefetch_weights,
    prefetched_columns,
    wait_for_previous,
)
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.jit import jit
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div

_MIN_BLOCK_IN = 32
_PROGRAMS_PER_MULTIPROCESSOR = 2


class FewRowsTiles(NamedTuple):
    """The most rows, a power of two that rows are padded to; outputs of a program, columns of a step (half as many for
    gate and up), warps, steps on their way, and the most splits of the columns."""

    rows: int
    block_out: int
    block_in: int
    num_warps: int
    num_stages: int
    most_splits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Columns of a step, columns of a split, and how many splits there are."""

    block_in: int
    split_in: int
    num_splits: int


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def few_rows_linear_kernel(
    x, weight, bias, out, parts, arrivals, num_rows, x_stride,
    OUT: tl.constexpr, IN: tl.constexpr, SPLIT_IN: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PREFETCHED: tl.constexpr, PER_LINE: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_OUT of the OUT results of up to ROWS rows, over SPLIT_IN columns, BLOCK_IN at a time.

    With GATED, ``weight`` has twice as many rows, gate then up.
    """
    let_next_begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    begin = split * SPLIT_IN
    end = tl.minimum(begin + SPLIT_IN, IN)
    line = weight + output.to(tl.int64)[:, None] * IN
    column = begin + tl.arange(0, BLOCK_IN)
    for start in tl.static_range(0, PREFETCHED, BLOCK_IN):
        later = begin + start + tl.arange(0, BLOCK_IN // PER_LINE) * PER_LINE
        later = tl.where(later < end, later, begin)
        prefetch_weights(line + later[None, :], PDL)
        if GATED:
            prefetch_weights(line + OUT * IN + later[None, :], PDL)
    wait_for_previous(PDL)
    sums = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    up_sums = sums
    values_place = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    for start in range(0, end - begin, BLOCK_IN):
        values = tl.load(values_place + start, mask=is_row[None, :], other=0.0)
        place = line + column[None, :] + start
        sums = tl.dot(tl.load(place), values, sums, input_precision=PRECISION)
        if GATED:
            up_sums = tl.dot(tl.load(place + OUT * IN), values, up_sums, input_precision=PRECISION)
    # fmt: off
    if SPLITS == 1:
        finish(sums, up_sums, bias, out, output, row, is_row, OUT, GATED, KIND, ALPHA, LIMIT, HAS_BIAS)
    else:
        per_part: tl.constexpr = BLOCK_OUT * ROWS * (2 if GATED else 1)
        in_part = tl.arange(0, BLOCK_OUT)[:, None] * ROWS + row[None, :]
        own = parts + (tile * SPLITS).to(tl.int64) * per_part + in_part
        tl.store(own + split * per_part, sums)
        if GATED:
            tl.store(own + split * per_part + BLOCK_OUT * ROWS, up_sums)
        if arrives_last(arrivals + tile, SPLITS):
            # Past the first-level cache, which does not see what other multiprocessors have written.
            sums = tl.load(own, cache_modifier=".cg")
            up_sums = sums
            if GATED:
                up_sums = tl.load(own + BLOCK_OUT * ROWS, cache_modifier=".cg")
            for part in tl.static_range(1, SPLITS):
                sums += tl.load(own + part * per_part, cache_modifier=".cg")
                if GATED:
                    up_sums += tl.load(own + part * per_part + BLOCK_OUT * ROWS, cache_modifier=".cg")
            finish(sums, up_sums, bias, out, output, row, is_row, OUT, GATED, KIND, ALPHA, LIMIT, HAS_BIAS)
    # fmt: on


@jit
def finish(
    sums, up_sums, bias, out, output, row, is_row,
    OUT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store the results of whole sums."""
    if HAS_BIAS:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias + OUT + output).to(tl.float32)[:, None]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        sums = squared_relu(sums)
    place = out + row.to(tl.int64)[None, :] * OUT + output[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[None, :])


def takes_weight(num_outputs: int, size: int, tiles: FewRowsTiles) -> bool:
    """Whether ``few_rows_linear_triton`` takes a weight (``num_outputs``, or twice as many for gate and up, ``size``):
    whole tiles."""
    return num_outputs % tiles.block_out == 0 and size % _MIN_BLOCK_IN == 0


def few_rows_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    *,
    tiles: FewRowsTiles,
    arrivals: torch.Tensor,
    num_multiprocessors: int,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` of ``x`` (N, in), whose rows may be slices of wider ones, for N up to
    ``tiles.rows``.  With an ``activation`` that has a gate, the weight is gate above up.

    ``arrivals`` int32, one for each tile, are zeros before and after the launch; launches that may run at the same time
    need their own.
    """
    num_rows, (num_outputs, size) = len(x), weight.shape
    is_gated = activation is not None and activation.num_parts == 2
    num_out = num_outputs // 2 if is_gated else num_outputs
    assert weight.is_contiguous() and takes_weight(num_out, size, tiles), (weight.shape, tiles)
    assert x.shape == (num_rows, size) and x.stride(1) == 1 and 0 < num_rows <= tiles.rows, (x.shape, tiles)
    num_tiles, itemsize = num_out // tiles.block_out, weight.dtype.itemsize
    split = _split_of(size, num_tiles, num_multiprocessors, tiles, is_gated=is_gated)
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    parts = out
    if split.num_splits > 1:
        per_part = tiles.block_out * tiles.rows * (1 + is_gated)
        parts = torch.empty(num_tiles * split.num_splits * per_part, dtype=torch.float32, device=x.device)
    few_rows_linear_kernel[(num_tiles, split.num_splits)](
        x, weight, bias, out, parts, arrivals, num_rows, x.stride(0),
        OUT=num_out, IN=size, SPLIT_IN=split.split_in, SPLITS=split.num_splits, ROWS=tiles.rows,
        BLOCK_OUT=tiles.block_out, BLOCK_IN=split.block_in,
        PREFETCHED=prefetched_columns(split.split_in, tiles.block_out * (1 + is_gated), itemsize, split.block_in),
        PER_LINE=min(LINE_BYTES // itemsize, split.block_in), HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **activation_constants(activation), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _split_of(size: int, num_tiles: int, num_multiprocessors: int, tiles: FewRowsTiles, *, is_gated: bool) -> _Split:
    """The splits follow from the shape, the tiles and the GPU, so sums have a fixed order."""
    block_in = min(size & -size, max(tiles.block_in // (1 + is_gated), _MIN_BLOCK_IN))
    wanted = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // num_tiles
    num_blocks = size // block_in
    per_split = ceil_div(num_blocks, max(1, min(wanted, tiles.most_splits, num_blocks)))
    return _Split(block_in=block_in, split_in=per_split * block_in, num_splits=ceil_div(num_blocks, per_split))
