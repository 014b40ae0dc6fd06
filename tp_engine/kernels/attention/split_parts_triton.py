"""Attention split over keys: each program writes its part, and the last one to arrive joins the parts of all.

::

    partial (N, heads, splits, head_dim), partial_lse (N, heads, splits)    float32
"""

import triton.language as tl

from tp_engine.kernels.jit import jit

# Parts that are joined at a time, and elements that each thread holds of them.
_MAX_JOINED_PARTS = 8
_JOINED_PER_THREAD = 64


@jit
def write_part(
    accumulated, total, peak, out, partial, partial_lse, first_row, row, column, inside, is_row, split, num_used,
    num_splits,
    HEAD_DIM: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the result of one split of ``num_used``: to ``out`` if it is the only one, else to ``partial``.

    The state is that of the online softmax; rows ``first_row`` (64 bits) + ``row`` (ROWS,) of a token's head, where
    ``is_row``, and ``column`` (HEAD_PAD,), where ``inside``.
    """
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if IS_SPLIT and num_used > 1:
        lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
        own_part = row * num_splits + split
        own_place = partial + first_row * num_splits * HEAD_DIM + own_part[:, None] * HEAD_DIM + column[None, :]
        tl.store(own_place, result, mask=inside)
        tl.store(partial_lse + first_row * num_splits + own_part, lse, mask=is_row)
    else:
        place = out + first_row * HEAD_DIM + row[:, None] * HEAD_DIM + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@jit
def join_splits(
    out, partial, partial_lse, first_row, row, column, is_row, num_used, num_splits,
    ROWS: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Write to ``out`` the attention over all keys of heads ``row`` (ROWS,), from that over each part.

    A part weighs as much as its sum of exponentials.  PARTS of all rows are loaded at once and added up in the threads
    that hold them, so that most joins wait for memory once.
    """
    joined = tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    is_column = column < HEAD_DIM
    partial += first_row * num_splits * HEAD_DIM
    partial_lse += first_row * num_splits
    for start in range(0, num_used, PARTS):
        split = start + tl.arange(0, PARTS)
        is_part = (split < num_used)[:, None] & is_row[None, :]
        part = row[None, :] * num_splits + split[:, None]
        lse = tl.load(partial_lse + part, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        place = partial + part[:, :, None] * HEAD_DIM + column[None, None, :]
        is_read = is_part[:, :, None] & is_column[None, None, :]
        states = tl.load(place, mask=is_read, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, shrink = tl.exp2(lse - base[None, :]), tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=0)
        joined = joined * shrink[:, None] + tl.sum(states * weights[:, :, None], axis=0)
        peak = new_peak
    result = joined / tl.where(total > 0, total, 1.0)[:, None]
    place_out = out + first_row * HEAD_DIM + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(place_out, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def joined_parts(num_rows: int, head_pad: int, num_warps: int) -> int:
    """How many parts of ``num_rows`` heads ``join_splits`` takes at a time: a power of two, if the arguments are."""
    return max(1, min(_MAX_JOINED_PARTS, num_warps * 32 * _JOINED_PER_THREAD // (num_rows * head_pad)))
