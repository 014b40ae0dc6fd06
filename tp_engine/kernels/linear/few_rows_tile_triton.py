"""A tile of a product of few rows: outputs of a weight by all rows, over a range of the columns.

::

    before the wait    the first BLOCK_IN columns of the weight are read, PREFETCHED further ones sent for
    after it           the rows, BLOCK_IN columns at a time: sums (BLOCK_OUT, ROWS) float32, and the rows' squares

``few_rows_linear_triton`` makes outputs of the sums, ``head_choice_triton`` the best token of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import prefetch_weights
from tp_engine.kernels.norm_triton import load_gain


@triton.jit  # type: ignore[untyped-decorator]
def scaled_rows(  # type: ignore[no-untyped-def]
    x,
    gain,
    column,
    row_place,
    is_row,
    squares,
    IN: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
):
    """Columns of the rows, (BLOCK_IN, ROWS) in the type of ``x``, times the norm's gain; ``squares`` with theirs."""
    values = tl.load(x + row_place[None, :] + column[:, None], mask=is_row[None, :], other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, axis=0)
        values = (wide * load_gain(gain, column, column < IN, OFFSET)[:, None]).to(values.dtype)
    return values, squares


@triton.jit  # type: ignore[untyped-decorator]
def send_for_columns(  # type: ignore[no-untyped-def]
    line,
    begin,
    end,
    BLOCK_IN: tl.constexpr,  # noqa: N803
    PREFETCHED: tl.constexpr,  # noqa: N803
    PER_LINE: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """Send for PREFETCHED columns of weights behind the first BLOCK_IN of a split, before the wait.

    ``line`` (BLOCK_OUT, 1) are the beginnings of rows; lines of memory have PER_LINE elements.
    """
    for start in tl.static_range(BLOCK_IN, BLOCK_IN + PREFETCHED, BLOCK_IN):
        later = begin + start + tl.arange(0, BLOCK_IN // PER_LINE) * PER_LINE
        later = tl.where(later < end, later, begin)
        prefetch_weights(line + later[None, :], PDL)


@triton.jit  # type: ignore[untyped-decorator]
def tile_sums(  # type: ignore[no-untyped-def]
    x,
    gain,
    place,
    up_place,
    first,
    first_up,
    row_place,
    is_row,
    column,
    width,
    IN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    NORM: tl.constexpr,  # noqa: N803
    OFFSET: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Sums over ``width`` columns of a tile (BLOCK_OUT, ROWS), those of up, and the rows' squares, all float32.

    ``first`` are the weights of the first BLOCK_IN columns, ``column``, which are at ``place``.
    """
    squares = tl.zeros([ROWS], dtype=tl.float32)
    values, squares = scaled_rows(x, gain, column, row_place, is_row, squares, IN, NORM, OFFSET)
    zeros = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    sums = tl.dot(first, values, zeros, input_precision=PRECISION)
    up_sums = zeros
    if GATED:
        up_sums = tl.dot(first_up, values, zeros, input_precision=PRECISION)
    for start in range(BLOCK_IN, width, BLOCK_IN):
        values, squares = scaled_rows(x, gain, column + start, row_place, is_row, squares, IN, NORM, OFFSET)
        sums = tl.dot(tl.load(place + start), values, sums, input_precision=PRECISION)
        if GATED:
            up_sums = tl.dot(tl.load(up_place + start), values, up_sums, input_precision=PRECISION)
    return sums, up_sums, squares
