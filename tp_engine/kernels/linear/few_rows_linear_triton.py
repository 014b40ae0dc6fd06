"""A linear layer applied to 2 to 256 rows, as in a decode step, with the norm before it and the sum behind it.

::

    grid (tiles, splits)       program (t, s): BLOCK_OUT outputs of all rows, over one range of the columns

    weight (out, in)  =  [ t0,s0 | t0,s1 ]      the weight is the left factor: 64 of its rows fill a matrix unit, and
                         [ t1,s0 | t1,s1 ]      x^T, 8 columns or more, is the right one, so few rows waste nothing
                         ...

    parts (tiles, splits, BLOCK_OUT, ROWS) float32        with GATED two: gate, up
    squares (tiles, splits, ROWS) float32                 with NORM: of the rows, over the columns of a split
    arrivals (tiles,)     splits that have written their part; the last to arrive adds up the parts, in their order

A layer of few rows takes as long as reading its weight.  So the columns are split until the programs fill the GPU, and
the first columns of a program's weight are on their way before the kernel that makes ``x`` has ended
(``dependent_launch_triton``).

RMS norm needs no kernel of its own: ``norm(x) W^T = (x * gain) W^T / rms(x)``.  ``x * gain`` is rounded once, as the
norm would be, and the squares are added up in float32 along the same columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    LINE_BYTES,
    dependent_launch,
    let_next_begin,
    prefetched_columns,
    wait_for_previous,
)
from tp_engine.kernels.elementwise_triton import activation_constants, gated
from tp_engine.kernels.linear.few_rows_tile_triton import send_for_columns, tile_sums
from tp_engine.kernels.linear.fused_linear import RowsToNorm
from tp_engine.model_config.mlp import Activation
from tp_engine.units import ceil_div


class Tiles(NamedTuple):
    """Outputs of a program, columns of a step (half as many for gate and up), warps, steps on their way, and the most
    splits of the columns."""

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int
    most_splits: int


# The most rows, a power of two that the rows are padded to, and the tiles.  scripts/bench_few_rows.py times them; not
# yet measured on a GPU.
TILES = (
    (8, Tiles(64, 128, 4, 3, 16)),
    (16, Tiles(64, 128, 4, 3, 16)),
    (32, Tiles(64, 128, 4, 3, 8)),
    (64, Tiles(64, 64, 4, 4, 8)),
    (128, Tiles(64, 64, 8, 3, 4)),
    (256, Tiles(64, 32, 8, 3, 2)),
)
MAX_ROWS = TILES[-1][0]
# Products of float32 have no matrix units, and are unrolled: more would take minutes to compile.
_MAX_FLOAT32_ROWS = 64
_MIN_BLOCK_IN = 32
_PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSizes:
    """How ``rows`` rows are multiplied: the tiles' shapes, columns of a split, and how many splits there are."""

    rows: int
    tiles: Tiles
    split_in: int
    num_splits: int


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    sums,
    up_sums,
    squares,
    bias,
    out,
    out_stride,
    output,
    row,
    is_row,
    eps,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
):
    """From whole sums to results, which are written, or with ADDS added to what is there, SCALE times."""
    if NORM:
        factor = tl.rsqrt(squares / IN + eps)[None, :]
        sums *= factor
        up_sums *= factor
    if HAS_BIAS:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias + OUT + output).to(tl.float32)[:, None]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    place = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    if ADDS:
        sums = tl.load(place, mask=is_row[None, :], other=0.0).to(tl.float32) + sums * SCALE
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def few_rows_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    gain,
    out,
    parts,
    squares_of_parts,
    arrivals,
    num_rows,
    x_stride,
    out_stride,
    eps,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    SPLIT_IN: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    PREFETCHED: tl.constexpr,  # noqa: N803
    PER_LINE: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
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
    column = begin + tl.arange(0, BLOCK_IN)
    line = output.to(tl.int64)[:, None] * IN
    place = weight + line + column[None, :]
    up_place = place + OUT * IN
    first = tl.load(place)
    first_up = first
    if GATED:
        first_up = tl.load(up_place)
    send_for_columns(weight + line, begin, end, BLOCK_IN, PREFETCHED, PER_LINE, PDL)
    if GATED:
        send_for_columns(weight + OUT * IN + line, begin, end, BLOCK_IN, PREFETCHED, PER_LINE, PDL)
    wait_for_previous(PDL)
    # fmt: off
    sums, up_sums, squares = tile_sums(
        x, gain, place, up_place, first, first_up, row.to(tl.int64) * x_stride, is_row, column, end - begin,
        IN, ROWS, BLOCK_OUT, BLOCK_IN, NORM, OFFSET, GATED, PRECISION,
    )
    # fmt: on
    if SPLITS == 1:
        # fmt: off
        finish(sums, up_sums, squares, bias, out, out_stride, output, row, is_row, eps,
               OUT, IN, NORM, HAS_BIAS, GATED, KIND, ALPHA, LIMIT, ADDS, SCALE)
        # fmt: on
    else:
        per_part: tl.constexpr = BLOCK_OUT * ROWS * (2 if GATED else 1)
        in_part = tl.arange(0, BLOCK_OUT)[:, None] * ROWS + row[None, :]
        own_parts = parts + (tile * SPLITS).to(tl.int64) * per_part + in_part
        own_squares = squares_of_parts + tile * SPLITS * ROWS + row
        tl.store(own_parts + split * per_part, sums)
        if GATED:
            tl.store(own_parts + split * per_part + BLOCK_OUT * ROWS, up_sums)
        if NORM:
            tl.store(own_squares + split * ROWS, squares)
        tl.debug_barrier()  # all threads' stores come before the one thread's arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            # Past the first-level cache, which does not see what other multiprocessors have written.
            sums = tl.load(own_parts, cache_modifier=".cg")
            up_sums = sums
            squares = row.to(tl.float32)
            if GATED:
                up_sums = tl.load(own_parts + BLOCK_OUT * ROWS, cache_modifier=".cg")
            if NORM:
                squares = tl.load(own_squares, cache_modifier=".cg")
            for part in tl.static_range(1, SPLITS):
                sums += tl.load(own_parts + part * per_part, cache_modifier=".cg")
                if GATED:
                    up_sums += tl.load(own_parts + part * per_part + BLOCK_OUT * ROWS, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(own_squares + part * ROWS, cache_modifier=".cg")
            # fmt: off
            finish(sums, up_sums, squares, bias, out, out_stride, output, row, is_row, eps,
                   OUT, IN, NORM, HAS_BIAS, GATED, KIND, ALPHA, LIMIT, ADDS, SCALE)
            # fmt: on


def takes_weight(weight: torch.Tensor, *, is_gated: bool = False) -> bool:
    """Whether ``few_rows_linear_triton`` takes a weight of this shape, for any number of rows that it takes."""
    num_outputs, _ = weight.shape
    num_out = num_outputs // 2 if is_gated else num_outputs
    is_whole = num_out > 0 and all(num_out % tiles.block_out == 0 for _, tiles in TILES) and takes_columns(weight)
    return weight.is_contiguous() and is_whole and not (is_gated and num_outputs % 2)


def takes_columns(weight: torch.Tensor) -> bool:
    """Whether the columns of ``weight`` are whole blocks."""
    return weight.shape[1] % _MIN_BLOCK_IN == 0


def max_rows(dtype: torch.dtype) -> int:
    """The most rows that ``few_rows_linear_triton`` takes."""
    return MAX_ROWS if dtype.itemsize == 2 else _MAX_FLOAT32_ROWS if dtype == torch.float32 else 0


def linear_sizes(
    weight: torch.Tensor, num_rows: int, num_multiprocessors: int, *, is_gated: bool = False, tiles: Tiles | None = None
) -> LinearSizes:
    """Sizes for ``num_rows`` rows; they follow from the padded rows, the shape and the GPU, so sums have a fixed order.

    ``num_multiprocessors`` are those to fill; 0: columns are not split.  ``tiles`` replaces the choice from ``TILES``.
    """
    num_outputs, size = weight.shape
    rows, usual = next(line for line in TILES if num_rows <= line[0])
    tiles = tiles or usual
    most_in = max(tiles.block_in // (1 + is_gated), _MIN_BLOCK_IN) if weight.dtype.itemsize == 2 else _MIN_BLOCK_IN
    tiles = tiles._replace(block_in=min(size & -size, most_in))
    num_tiles = ceil_div(num_outputs // (2 if is_gated else 1), tiles.block_out)
    wanted = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // num_tiles
    num_blocks = size // tiles.block_in
    per_split = ceil_div(num_blocks, max(1, min(wanted, tiles.most_splits, num_blocks)))
    return LinearSizes(
        rows=rows, tiles=tiles, split_in=per_split * tiles.block_in, num_splits=ceil_div(num_blocks, per_split)
    )


def few_rows_linear_triton(
    x: torch.Tensor | RowsToNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    *,
    stream: torch.Tensor | None = None,
    scale: float = 1.0,
    sizes: LinearSizes,
    arrivals: torch.Tensor,
) -> torch.Tensor:
    """``fused_linear.fused_linear`` of ``x`` (N, in), whose rows may be slices of wider ones, for N up to ``max_rows``.

    ``sizes`` are those of ``linear_sizes``.  ``arrivals``, int32, one for each tile, are zeros before and after the
    launch; launches that may run at the same time need their own.
    """
    x, norm = (x.x, x.rule) if isinstance(x, RowsToNorm) else (x, None)
    num_rows, (num_outputs, size) = len(x), weight.shape
    assert x.shape == (num_rows, size) and x.stride(1) == 1 and 0 < num_rows <= sizes.rows, (x.shape, sizes)
    is_gated, tiles = activation is not None, sizes.tiles
    num_out = num_outputs // 2 if is_gated else num_outputs
    num_tiles, num_splits = num_out // tiles.block_out, sizes.num_splits
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device) if stream is None else stream
    assert out.shape == (num_rows, num_out) and out.stride(1) == 1, (out.shape, out.stride())
    assert num_splits == 1 or num_tiles <= len(arrivals), (num_tiles, len(arrivals))
    parts = squares = out
    if num_splits > 1:
        per_part = tiles.block_out * sizes.rows * (2 if is_gated else 1)
        parts = torch.empty(num_tiles * num_splits * per_part, dtype=torch.float32, device=x.device)
        squares = torch.empty(num_tiles * num_splits * sizes.rows, dtype=torch.float32, device=x.device)
    itemsize = weight.dtype.itemsize
    later = sizes.split_in - tiles.block_in
    few_rows_linear_kernel[(num_tiles, num_splits)](
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        out,
        parts,
        squares,
        arrivals,
        num_rows,
        x.stride(0),
        out.stride(0),
        0.0 if norm is None else norm.eps,
        OUT=num_out,
        IN=size,
        SPLIT_IN=sizes.split_in,
        SPLITS=num_splits,
        ROWS=sizes.rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        PREFETCHED=prefetched_columns(later, tiles.block_out * (1 + is_gated), itemsize, tiles.block_in),
        PER_LINE=min(LINE_BYTES // itemsize, tiles.block_in),
        NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset,
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        ADDS=stream is not None,
        SCALE=scale,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **activation_constants(activation),
        **dependent_launch(x.device),
    )
    return out
