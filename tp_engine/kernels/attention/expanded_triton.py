"""Attention of one request's last tokens over keys and values that were made from latents (``attention/expanded.py``).

::

    query   (t, heads, nope + rope)      the last t of n positions
    made    (n, heads, nope + value)     a head's [ key without rotation | value ], as one product makes them
    turned  (n, rope)                    the rotated part of keys, the same for all heads

    score = query[nope] . made[nope] + query[rope] . turned      two products: 192 is not a power of two, 128 and 64 are

So keys are never joined, values never padded, and what heads share is in memory once.  A program has ROWS queries of
one head; those with most keys begin first.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.attention.paged_tiles_triton import LOG2_E, add_tile
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit

_MIN_SIZE = 16  # of each side of a matrix product


@dataclass(frozen=True, slots=True)
class ExpandedSizes:
    """``rows`` queries of a program, ``tile`` keys at a time, ``num_stages`` tiles in flight."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


@jit
def attend_made(
    latents, turns, accumulated, total, peak, made, turned, start, num_keys, own, scale, made_stride, turned_stride,
    MASKED: tl.constexpr, TILE: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys from ``start`` on; ``made`` is where the head's first one is."""
    position = start + tl.arange(0, TILE)
    is_key = position < num_keys
    row = made + position.to(tl.int64) * made_stride
    keys = states_of(row, is_key, MASKED, NOPE, NOPE_PAD)
    values = states_of(row + NOPE, is_key, MASKED, VALUE, VALUE_PAD)
    shared = states_of(turned + position.to(tl.int64) * turned_stride, is_key, MASKED, ROPE, ROPE_PAD)
    scores = tl.dot(latents, tl.trans(keys), input_precision="ieee")
    scores = tl.dot(turns, tl.trans(shared), scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(position[None, :] <= own[:, None], scores, float("-inf"))
    return add_tile(scores, values, 1.0, accumulated, total, peak, False)


@jit
def states_of(rows, is_row, MASKED: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """(rows, PAD) elements from ``rows`` (pointers) on; zeros from SIZE on, and if MASKED where ``is_row`` is false."""
    column = tl.arange(0, PAD)
    place = rows[:, None] + column[None, :]
    if SIZE != PAD:
        states = tl.load(place, mask=is_row[:, None] & (column < SIZE)[None, :], other=0.0)
    elif MASKED:
        states = tl.load(place, mask=is_row[:, None], other=0.0)
    else:
        states = tl.load(place)
    return states


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
@no_type_check
def expanded_prefill_kernel(
    query, made, turned, out, scale, num_queries, num_keys, query_stride, made_stride, turned_stride, out_stride,
    NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, block): ROWS queries of a head, the last ones first."""
    begin_program(PDL)
    head, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    number = block * ROWS + tl.arange(0, ROWS)
    is_query = number < num_queries
    token = number.to(tl.int64)
    place = query + token * query_stride + head * (NOPE + ROPE)
    latents = states_of(place, is_query, True, NOPE, NOPE_PAD)
    turns = states_of(place + NOPE, is_query, True, ROPE, ROPE_PAD)
    accumulated = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    earlier = num_keys - num_queries
    own = earlier + number
    first = made + head * (NOPE + VALUE)
    seen_by_all = (earlier + block * ROWS + 1) // TILE * TILE
    end = tl.minimum(earlier + (block + 1) * ROWS, num_keys)
    # fmt: off
    for position in range(0, seen_by_all, TILE):
        accumulated, total, peak = attend_made(
            latents, turns, accumulated, total, peak, first, turned, position, num_keys, own, scale, made_stride,
            turned_stride, False, TILE, NOPE, NOPE_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD)
    for position in range(seen_by_all, end, TILE):
        accumulated, total, peak = attend_made(
            latents, turns, accumulated, total, peak, first, turned, position, num_keys, own, scale, made_stride,
            turned_stride, True, TILE, NOPE, NOPE_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD)
    # fmt: on
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    column = tl.arange(0, VALUE_PAD)
    target = (out + token * out_stride + head * VALUE)[:, None] + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_query[:, None] & (column < VALUE)[None, :])


def expanded_prefill_triton(
    query: torch.Tensor,
    out: torch.Tensor,
    made: torch.Tensor,
    turned: torch.Tensor,
    *,
    scale: float,
    sizes: ExpandedSizes,
) -> None:
    """Attend into ``out`` (t, heads, value); a token's heads are contiguous everywhere, tokens may be apart."""
    (num_queries, num_heads, _), num_keys, rope = query.shape, len(made), turned.shape[1]
    nope = query.shape[2] - rope
    value = made.shape[2] - nope
    for rows in (query, out, made):
        assert rows.stride()[1:] == (rows.shape[2], 1), "a token's heads must be contiguous"
    assert turned.stride(1) == 1 and num_keys >= num_queries
    pads = {
        f"{name}_PAD": max(_MIN_SIZE, triton.next_power_of_2(size))
        for name, size in (("NOPE", nope), ("ROPE", rope), ("VALUE", value))
    }
    expanded_prefill_kernel[(num_heads, triton.cdiv(num_queries, sizes.rows))](
        query, made, turned, out, scale * LOG2_E, num_queries, num_keys, query.stride(0), made.stride(0),
        turned.stride(0), out.stride(0), NOPE=nope, ROPE=rope, VALUE=value, ROWS=sizes.rows, TILE=sizes.tile,
        num_warps=sizes.num_warps, num_stages=sizes.num_stages, **pads, **dependent_launch(query.device),
    )  # fmt: skip
