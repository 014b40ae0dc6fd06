"""Decode attention over the paged cache: many requests with one query each (or a few), split over their keys.

::

    grid (KV heads, splits, B)      program (h, s, b): all queries of request b on KV head h, over one range of its keys

    tiles of request b      |0|1|2|3|4|5|6|7|8|       ceil(visible keys / TILE)
    splits, here at most 4  |  s0   |  s1   |s2|       the other programs end at once

    partial (N, heads, splits, head_dim), partial_lse (N, heads, splits)    float32
    arrivals (B, KV heads)    splits that have written their part; the last to arrive joins the parts, in their order

A small batch is split until its programs fill the GPU: ``usual_splits``.  A larger one fills it without splits, and
each request's result is written directly.  But a request of many keys is still split, into at most ``num_splits``, so
that the others need not wait for it.

The grid depends on the size of the batch alone and lengths are read on the device, so a CUDA graph can hold both.
The numbers of splits are not constants of the compiled code: a new one would stop the engine while Triton compiles.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.attention.paged_tiles_triton import (
    attend_tile,
    cache_arguments,
    layer_constants,
    score_scale,
    to_float16,
    with_sinks,
)
from tp_engine.kernels.attention.split_parts_triton import join_splits, joined_parts, write_part
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

MAX_SPLITS = 64
_USUAL_GROUP = 8  # the order of a sum must not depend on how many heads of a group a rank has
# On an H200 (docs/benchmarks.md) more programs do not read faster, and their parts must be joined.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_PROGRAMS_PER_MULTIPROCESSOR = 16  # a program without work ends at once, but costs a launch
MAX_ARRIVALS = 4096
FIXED_SPLITS, _FIXED_KEYS, _LONG_KEYS = 16, 1024, 2048
_MIN_ROWS = 16  # of a matrix product


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """``tile`` keys at a time by ``num_warps`` warps, ``num_stages`` tiles in flight.

    Each request's keys are split into ``usual_splits`` parts, or into more if a part would have more than
    ``long_keys``; at most ``num_splits``.
    """

    tile: int
    num_warps: int
    num_stages: int
    usual_splits: int
    num_splits: int
    long_keys: int = _LONG_KEYS


@triton.jit(do_not_specialize=["table_stride", "usual_splits", "num_splits"])
@no_type_check
def paged_decode_kernel(
    query, key_cache, value_cache, key_scales, value_scales, block_table, seq_lens, sinks, out, partial, partial_lse,
    arrivals, scale, query_stride, table_stride, usual_splits, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, ROWS: tl.constexpr,
    JOINED_ROWS: tl.constexpr, JOINED_PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TILE: tl.constexpr,
    LONG_TILES: tl.constexpr, IS_SPLIT: tl.constexpr, WINDOW: tl.constexpr, QUANTISED: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one split.  A request of one split goes to ``out`` (N, heads, head_dim), others to ``partial``."""
    begin_program(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    first, tiles, per_split = split_of(length, usual_splits, num_splits, QUERY_LEN, TILE, LONG_TILES, WINDOW)
    tile = split * per_split
    end = tl.minimum(tile + per_split, tiles)
    if tile < end or split == 0:  # padding has no keys, and a result of zeros
        line = tl.arange(0, ROWS)
        column = tl.arange(0, HEAD_PAD)
        inside = (line < QUERY_LEN * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        # Only the start of the request's memory has 64 bits: 64-bit offsets of every element would fill the registers.
        own_query = query + request * QUERY_LEN * query_stride
        head = kv_head * GROUP + line % GROUP
        place = (line // GROUP * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        states = tl.load(own_query + place, mask=inside, other=0.0)
        if QUANTISED and states.dtype == tl.bfloat16 and key_cache.dtype.element_ty.is_fp8():
            # The conversion to bfloat16 costs more than the product; 8-bit floats fit into float16, with more digits.
            states = to_float16(states)
        own = length - QUERY_LEN + line // GROUP

        accumulated = tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        table_row = block_table + request * table_stride
        for index in range(tile, end):
            # fmt: off
            accumulated, total, peak = attend_tile(
                states, accumulated, total, peak, key_cache, value_cache, key_scales, value_scales, table_row,
                first + index * TILE, length, own, kv_head, scale,
                True, TILE, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, WINDOW,
                QUANTISED, SOFTCAP)
            # fmt: on

        if HAS_SINKS:
            accumulated, total, peak = with_sinks(accumulated, total, peak, sinks, head, split == 0)
        first_row = request * QUERY_LEN * NUM_KV_HEADS * GROUP
        row = line // GROUP * NUM_KV_HEADS * GROUP + head
        num_used = tl.cdiv(tiles, per_split)
        # fmt: off
        write_part(accumulated, total, peak, out, partial, partial_lse, first_row, row, column, inside,
                   line < QUERY_LEN * GROUP, split, num_used, num_splits, HEAD_DIM, IS_SPLIT)
        if IS_SPLIT and num_used > 1:
            arrived = arrivals + request * NUM_KV_HEADS + kv_head
            if arrives_last(arrived, num_used):
                own_line = tl.arange(0, JOINED_ROWS)
                own_row = own_line // GROUP * NUM_KV_HEADS * GROUP + kv_head * GROUP + own_line % GROUP
                join_splits(out, partial, partial_lse, first_row, own_row, column, own_line < QUERY_LEN * GROUP,
                            num_used, num_splits, JOINED_ROWS, JOINED_PARTS, HEAD_DIM, HEAD_PAD)
        # fmt: on


@jit
def split_of(
    length, usual_splits, num_splits,
    QUERY_LEN: tl.constexpr, TILE: tl.constexpr, LONG_TILES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The first position that is read, a multiple of TILE; the tiles from there on; the tiles of each split."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERY_LEN - WINDOW + 1, 0) // TILE * TILE
    tiles = tl.cdiv(length - first, TILE)
    per_split = tl.minimum(tl.maximum(tl.cdiv(tiles, usual_splits), 1), LONG_TILES)
    return first, tiles, tl.maximum(tl.cdiv(tiles, num_splits), per_split)


def paged_decode_triton(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sizes: DecodeSizes,
    arrivals: torch.Tensor,
    query_len: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """``paged_attention`` of B requests with ``query_len`` queries each, N = B x query_len, into ``out``.

    ``query`` (N, heads, head_dim), a token's heads contiguous; ``out`` (N, heads, head_dim), contiguous; the rest as in
    ``paged_attention``.  Launches the same kernel for every content of ``seq_lens`` and ``block_table``.

    ``arrivals`` (``MAX_ARRIVALS``,) int32 are zeros before and after the launch; launches that may run at the same
    time need their own.
    """
    num_tokens, _, head_dim = query.shape
    if num_tokens == 0:
        return
    num_splits = sizes.num_splits
    assert out.is_contiguous() and block_table.stride(1) == 1 and num_tokens == query_len * len(seq_lens)
    assert num_splits == 1 or len(seq_lens) * kv.cache.shape[3] <= len(arrivals), (num_splits, len(arrivals))
    constants = layer_constants(query, kv, window, softcap, sinks)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((*query.shape[:2], num_splits, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((*query.shape[:2], num_splits), dtype=torch.float32, device=query.device)
    paged_decode_kernel[(constants["NUM_KV_HEADS"], num_splits, len(seq_lens))](
        query, *cache_arguments(kv), block_table, seq_lens, sinks, out, partial, lse, arrivals,
        score_scale(scale, softcap), query.stride(0), block_table.stride(0), sizes.usual_splits, num_splits,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(query_len * constants["GROUP"])), QUERY_LEN=query_len,
        TILE=sizes.tile, LONG_TILES=max(1, sizes.long_keys // sizes.tile), IS_SPLIT=num_splits > 1,
        JOINED_ROWS=triton.next_power_of_2(query_len * constants["GROUP"]),
        JOINED_PARTS=joined_parts(_USUAL_GROUP, constants["HEAD_PAD"], sizes.num_warps), num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, **dependent_launch(query.device), **constants,
    )  # fmt: skip


def decode_sizes(
    num_requests: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_multiprocessors: int,
    *,
    is_quantised: bool = False,
    is_fixed: bool = False,
) -> DecodeSizes:
    """Sizes for a batch on a GPU; ``itemsize`` is that of the query's type, ``is_quantised`` the cache.

    The numbers of splits, powers of two, follow from the size of the batch, and not from its lengths.  If they are
    ``is_fixed``, they are the same for every batch and every GPU: a request's splits follow from its length alone.  A
    batch of any size then has partial results of ``FIXED_SPLITS`` splits, so its ``arrivals`` are as many times longer.
    """
    num_programs = max(1, num_requests * num_kv_heads)
    usual_splits = power_of_two_splits(num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // num_programs)
    num_splits = max(
        usual_splits, power_of_two_splits(num_multiprocessors * _MOST_PROGRAMS_PER_MULTIPROCESSOR // num_programs)
    )
    head_pad = triton.next_power_of_2(head_dim)
    head_bytes = head_pad * itemsize
    if head_pad > 256:
        tile, num_warps, num_stages = (32, 8, 2) if itemsize <= 2 else (16, 8, 1)
    elif head_bytes > 256:
        tile, num_warps, num_stages = 32, 4, 5 if head_bytes <= 512 else 2
    elif is_quantised:
        tile, num_warps, num_stages = 128, 4, 2
    else:
        tile, num_warps, num_stages = 64, 2, 3
    usual, most, long_keys = (1, FIXED_SPLITS, _FIXED_KEYS) if is_fixed else (usual_splits, num_splits, _LONG_KEYS)
    return DecodeSizes(
        tile=tile, num_warps=num_warps, num_stages=num_stages, usual_splits=usual, num_splits=most, long_keys=long_keys
    )


def power_of_two_splits(wanted: int) -> int:
    """The largest power of two up to ``wanted`` and ``MAX_SPLITS``; at least 1."""
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))
