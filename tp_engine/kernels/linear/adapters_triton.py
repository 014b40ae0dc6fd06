"""Products with adapters in two kernels: to ``max_rank`` elements for each part, and from these to the outputs.

::

    shrink   program (tile, part)           up to 16 rows of one slot times that part of its A: float32, in memory
    expand   program (tile, block)          these times a block of one part's columns of B, added to the outputs

A program has rows of one slot only, and its loops do not depend on how many rows there are, so a row's result does not
depend on the rest of the step.
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.linear.adapters import TILE_ROWS, AdapterRows, AdapterWeights

_BLOCK_IN, _BLOCK_OUT = 128, 64
_MIN_RANK = 16  # of matrix units


@jit
def shrink_kernel(
    x, x_stride, a, ranks, rows, tiles, shrunk,
    IN: tl.constexpr, RANK: tl.constexpr, RANK_ROOM: tl.constexpr, PARTS: tl.constexpr, BLOCK_IN: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ``shrunk`` (n, PARTS * RANK) of the rows of one tile and one part."""
    begin_program(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    first, count, slot = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tl.load(ranks + slot) > 0:
        own, k, column = tl.arange(0, TILE), tl.arange(0, RANK_ROOM), tl.arange(0, BLOCK_IN)
        row = tl.load(rows + first + own, mask=own < count, other=0).to(tl.int64)
        of_x = x + row[:, None] * x_stride
        of_a = a + ((slot * PARTS + part) * RANK + k).to(tl.int64)[:, None] * IN
        sums = tl.zeros((TILE, RANK_ROOM), dtype=tl.float32)
        for start in range(0, IN, BLOCK_IN):
            at = start + column
            values = tl.load(of_x + at[None, :], mask=(own < count)[:, None] & (at < IN)[None, :], other=0.0)
            weights = tl.load(of_a + at[None, :], mask=(k < RANK)[:, None] & (at < IN)[None, :], other=0.0)
            sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
        to = shrunk + (first + own)[:, None] * (PARTS * RANK) + part * RANK + k[None, :]
        tl.store(to, sums, mask=(own < count)[:, None] & (k < RANK)[None, :])


@jit
def expand_kernel(
    shrunk, b, ranks, rows, tiles, out, part, first_column, num_columns,
    OUT: tl.constexpr, RANK: tl.constexpr, RANK_ROOM: tl.constexpr, PARTS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: add to a block of one part's columns, for the rows of one tile."""
    begin_program(PDL)
    tile = tl.program_id(0)
    first, count, slot = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tl.load(ranks + slot) > 0:
        own, k = tl.arange(0, TILE), tl.arange(0, RANK_ROOM)
        column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        is_row, is_rank, is_column = (own < count)[:, None], k < RANK, (column < num_columns)[None, :]
        row = tl.load(rows + first + own, mask=own < count, other=0).to(tl.int64)
        from_a = shrunk + (first + own)[:, None] * (PARTS * RANK) + part * RANK + k[None, :]
        values = tl.load(from_a, mask=is_row & is_rank[None, :], other=0.0)
        of_b = b + (slot * RANK + k).to(tl.int64)[:, None] * OUT + first_column + column[None, :]
        weights = tl.load(of_b, mask=is_rank[:, None] & is_column, other=0.0).to(tl.float32)
        added = tl.dot(values, weights, input_precision="ieee")
        to = out + row[:, None] * OUT + first_column + column[None, :]
        old = tl.load(to, mask=is_row & is_column, other=0.0).to(tl.float32)
        tl.store(to, (old + added).to(out.dtype.element_ty), mask=is_row & is_column)


def add_adapters_triton(out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """``adapters.add_adapters``; ``out`` is contiguous, and so are the rows of ``x``."""
    a, b, parts, rank = weights.a, weights.b, len(weights.part_sizes), weights.max_rank
    assert out.is_contiguous() and x.stride(1) == 1 and out.dtype is x.dtype is a.dtype
    num_tiles, room = len(rows.tiles), max(triton.next_power_of_2(rank), _MIN_RANK)
    shrunk = torch.empty((rows.num_rows, parts * rank), dtype=torch.float32, device=x.device)
    sizes = {"RANK": rank, "RANK_ROOM": room, "PARTS": parts, "TILE": TILE_ROWS, **dependent_launch(x.device)}
    shrink_kernel[(num_tiles, parts)](
        x, x.stride(0), a, weights.ranks, rows.rows, rows.tiles, shrunk,
        IN=a.shape[2], BLOCK_IN=_BLOCK_IN, **sizes,
    )  # fmt: skip
    first = 0
    for part, size in enumerate(weights.part_sizes):
        expand_kernel[(num_tiles, triton.cdiv(size, _BLOCK_OUT))](
            shrunk, b, weights.ranks, rows.rows, rows.tiles, out, part, first, size,
            OUT=b.shape[2], BLOCK_OUT=_BLOCK_OUT, **sizes,
        )  # fmt: skip
        first += size
