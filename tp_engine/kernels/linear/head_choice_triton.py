"""The LM head's product of 1 to 256 rows that writes no logits: it chooses each row's best token itself.

::

    program t of the product    BLOCK_OUT tokens of all rows: sums, rounded to the type of the logits, scale and cap,
                                temperature and noise  ->  each row's best rank key of the tile
    program i of the join       the keys of some rows, of all tiles  ->  the rows' keys and tokens; if asked, it ends
                                the decode step of the rows, too

    parts (tiles, ROWS) int64   8 bytes for a tile's logits of a row

The loop over the columns is that of products of few rows (``few_rows_tile_triton``); a vocabulary has tiles enough to
fill a GPU, so columns are not split.  Scores, noise and keys are those of ``sampling/best_triton``, so a row's token is
the one that ``best_tokens_triton`` chooses from the logits of the same product.  Parameters come from the rows' tables,
and one launch serves greedy rows and rows with a temperature; if any row has one, noise is made for all of them.
"""

from __future__ import annotations

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
from tp_engine.kernels.elementwise_triton import capped
from tp_engine.kernels.linear.few_rows_linear_triton import (
    LinearSizes,
    Tiles,
    linear_sizes,
    max_rows,
    takes_columns,
)
from tp_engine.kernels.linear.few_rows_tile_triton import send_for_columns, tile_sums
from tp_engine.kernels.sampling.best_triton import BestTokens, settle_rows
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    drawn_scores,
    noise_words,
    pack_scores,
    row_of,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables
from tp_engine.kernels.steps.decode_inputs import RowTables

_JOINED_ROWS, _JOINED_TILES = 4, 1024  # of a program; the keys of four rows fill a sector of memory


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def head_choice_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    rows,
    positions,
    floats,
    top_ks,
    seeds,
    parts,
    num_rows,
    x_stride,
    num_ids,
    first_id,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    PREFETCHED: tl.constexpr,  # noqa: N803
    PER_LINE: tl.constexpr,  # noqa: N803
    NUM_FLOATS: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: the best keys of BLOCK_OUT of the OUT tokens, of which ``num_ids`` exist, of up to ROWS rows."""
    let_next_begin(PDL)
    token = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    line = weight + tl.minimum(token, OUT - 1).to(tl.int64)[:, None] * IN
    column = tl.arange(0, BLOCK_IN)
    place = line + column[None, :]
    first = tl.load(place)
    send_for_columns(line, 0, IN, BLOCK_IN, PREFETCHED, PER_LINE, PDL)
    wait_for_previous(PDL)
    row = tl.arange(0, ROWS)
    known = tl.minimum(row, num_rows - 1).to(tl.int64)  # what is found for rows beyond is not read
    batch_row, temperature, _ = row_of(rows, floats, top_ks, known, NUM_FLOATS)
    word_1, word_2 = noise_words(None, seeds, positions, known, batch_row, False)
    # fmt: off
    sums, _, _ = tile_sums(
        x, None, place, place, first, first, row.to(tl.int64) * x_stride, row < num_rows, column, IN,
        IN, ROWS, BLOCK_OUT, BLOCK_IN, False, 0.0, False, PRECISION,
    )
    # fmt: on
    scores = sums.to(x.dtype.element_ty).to(tl.float32)
    if SCALE != 1.0 or CAP > 0:
        scores = capped(scores, SCALE, CAP).to(x.dtype.element_ty).to(tl.float32)
    token_id = (token + first_id)[:, None]
    if tl.max(temperature, axis=0) > 0:
        scores = drawn_scores(scores, token_id, temperature[None, :], word_1[None, :], word_2[None, :])
    keys = tl.where((token < num_ids)[:, None], pack_scores(scores, token_id), LOWEST_KEY)
    tl.store(parts + tl.program_id(0) * ROWS + row, tl.max(keys, axis=0))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def join_tiles_kernel(  # type: ignore[no-untyped-def]
    parts,
    rows,
    keys_out,
    tokens_out,
    token_table,
    num_computed,
    num_rows,
    token_stride,
    TILES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_TILES: tl.constexpr,  # noqa: N803
    ADVANCES: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: BLOCK_ROWS of the ``num_rows`` rows, BLOCK_TILES of the TILES at a time."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    best = tl.full([BLOCK_ROWS], LOWEST_KEY, tl.int64)
    for start in range(0, TILES, BLOCK_TILES):
        tile = (start + tl.arange(0, BLOCK_TILES))[:, None]
        keys = tl.load(parts + tile * ROWS + place[None, :], mask=tile < TILES, other=LOWEST_KEY)
        best = tl.maximum(best, tl.max(keys, axis=0))
    exists = place < num_rows
    settle_rows(best, place, exists, rows, keys_out, tokens_out, token_table, num_computed, token_stride, ADVANCES)


def takes_head(weight: torch.Tensor) -> bool:
    """Whether ``head_choice_triton`` takes a head with this weight, for up to ``max_rows`` rows."""
    return weight.is_contiguous() and takes_columns(weight) and max_rows(weight.dtype) > 0


def head_sizes(weight: torch.Tensor, num_rows: int, tiles: Tiles | None = None) -> LinearSizes:
    """Sizes for ``num_rows`` rows; ``tiles`` replaces the choice from ``few_rows_linear_triton.TILES``."""
    return linear_sizes(weight, num_rows, 0, tiles=tiles)


def head_choice_triton(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    *,
    first_id: int,
    num_ids: int,
    scale: float = 1.0,
    softcap: float | None = None,
    sizes: LinearSizes,
    advanced: RowTables | None = None,
) -> BestTokens:
    """``best_tokens_triton`` of ``hidden`` (n, in) by ``weight`` (out, in), of the same type.

    The weight's first ``num_ids`` rows are the tokens from ``first_id`` on; without any, all keys are the lowest.
    Logits are multiplied by ``scale`` and bounded by ``softcap``.  ``sizes`` are those of ``head_sizes``.  The others
    are as there: ``rows`` (n,) int32, which are greedy or have a temperature alone, ``positions`` (n,) int64.
    """
    num_rows, (num_out, size) = len(hidden), weight.shape
    assert hidden.shape == (num_rows, size) and hidden.stride(1) == 1 and 0 < num_rows <= sizes.rows, hidden.shape
    assert sizes.num_splits == 1 and 0 <= num_ids <= num_out, (sizes, num_ids)
    tiles, itemsize, device = sizes.tiles, weight.dtype.itemsize, weight.device
    num_tiles = triton.cdiv(num_out, tiles.block_out)
    parts = torch.empty((num_tiles, sizes.rows), dtype=torch.int64, device=device)
    keys = torch.empty(num_rows, dtype=torch.int64, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    head_choice_kernel[(num_tiles,)](
        hidden,
        weight,
        rows,
        positions,
        tables.floats,
        tables.top_k,
        tables.seeds,
        parts,
        num_rows,
        hidden.stride(0),
        num_ids,
        first_id,
        OUT=num_out,
        IN=size,
        ROWS=sizes.rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        PREFETCHED=prefetched_columns(size - tiles.block_in, tiles.block_out, itemsize, tiles.block_in),
        PER_LINE=min(LINE_BYTES // itemsize, tiles.block_in),
        NUM_FLOATS=NUM_FLOATS,
        SCALE=scale,
        CAP=softcap or 0.0,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dependent_launch(device),
        **LAUNCH_OPTIONS,
    )
    join_tiles_kernel[(triton.cdiv(num_rows, _JOINED_ROWS),)](
        parts,
        rows,
        keys,
        token_ids,
        advanced.token_ids if advanced else None,
        advanced.num_computed if advanced else None,
        num_rows,
        advanced.token_ids.stride(0) if advanced else 0,
        TILES=num_tiles,
        ROWS=sizes.rows,
        BLOCK_ROWS=_JOINED_ROWS,
        BLOCK_TILES=min(triton.next_power_of_2(num_tiles), _JOINED_TILES),
        ADVANCES=advanced is not None,
        num_warps=8,
        **dependent_launch(device),
    )
    return BestTokens(keys, token_ids, None)
