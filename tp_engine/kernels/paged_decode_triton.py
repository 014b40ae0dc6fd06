"""Decode attention over the paged cache: many requests with one query each (or a few), split over their keys.

::

    grid (KV heads, splits, B)      program (h, s, b): all queries of request b on KV head h, over one range of its keys

    tiles of request b      |0|1|2|3|4|5|6|7|8|       ceil(visible keys / TILE)
    splits, 4 at most       |  s0   |  s1   |s2|       each at least MIN_TILES tiles; the other programs end at once

    partial (N, heads, splits, head_dim) float32, partial_lse (N, heads, splits) float32    joined by a second kernel

The grid depends on the size of the batch alone and lengths are read on the device, so a CUDA graph can hold both.
The number of splits is no constant of the compiled code, as a new one would stop the engine while Triton compiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tp_engine.kernels.paged_tiles_triton import LOG2_E, attend_tile, cache_arguments, layer_constants

MAX_SPLITS = 64
# Widths of the joining kernel, which is compiled for the smallest that holds the splits.
_JOIN_WIDTHS = (8, MAX_SPLITS)
# Enough programs that the last wave of them is short next to the rest.
_PROGRAMS_PER_MULTIPROCESSOR = 16
# A split below so many keys costs more to start and to join than it saves.
_MIN_KEYS_PER_SPLIT = 256
_MIN_ROWS = 16  # of a matrix product


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """``tile`` keys at a time by ``num_warps`` warps, ``num_stages`` tiles on their way; at most ``num_splits``."""

    tile: int
    num_warps: int
    num_stages: int
    num_splits: int


@triton.jit(do_not_specialize=["table_stride", "num_splits"])  # type: ignore[untyped-decorator]
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_table,
    seq_lens,
    out,
    partial_lse,
    scale,
    query_stride,
    table_stride,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    QUERY_LEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEAD_PAD: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    MIN_TILES: tl.constexpr,  # noqa: N803
    IS_SPLIT: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    QUANTISED: tl.constexpr,  # noqa: N803
):
    """``out`` is ``partial`` with IS_SPLIT, else the output (N, heads, head_dim) of the only split."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + request)
    first, tiles, per_split = split_of(length, num_splits, QUERY_LEN, TILE, MIN_TILES, WINDOW)
    tile = split * per_split
    end = tl.minimum(tile + per_split, tiles)
    if tile < end or not IS_SPLIT:
        line = tl.arange(0, ROWS)
        column = tl.arange(0, HEAD_PAD)
        inside = (line < QUERY_LEN * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        # 64 bits only where the request's memory begins: as offsets of every element they would fill the registers.
        own_query = query + request * QUERY_LEN * query_stride
        head = kv_head * GROUP + line % GROUP
        place = (line // GROUP * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        states = tl.load(own_query + place, mask=inside, other=0.0)
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
                True, TILE, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, WINDOW, QUANTISED)
            # fmt: on

        result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
        first_row = request * QUERY_LEN * NUM_KV_HEADS * GROUP * num_splits
        row = (line // GROUP * NUM_KV_HEADS * GROUP + head) * num_splits + split
        place = row[:, None] * HEAD_DIM + column[None, :]
        tl.store(out + first_row * HEAD_DIM + place, result.to(out.dtype.element_ty), mask=inside)
        if IS_SPLIT:
            lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
            tl.store(partial_lse + first_row + row, lse, mask=line < QUERY_LEN * GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def split_of(  # type: ignore[no-untyped-def]
    length,
    num_splits,
    QUERY_LEN: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    MIN_TILES: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
):
    """The first position that is read, a multiple of TILE; tiles from there on; tiles of each split."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERY_LEN - WINDOW + 1, 0) // TILE * TILE
    tiles = tl.cdiv(length - first, TILE)
    return first, tiles, tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def join_splits_kernel(  # type: ignore[no-untyped-def]
    partial,
    partial_lse,
    seq_lens,
    out,
    num_splits,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    QUERY_LEN: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEAD_PAD: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    MIN_TILES: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
):
    """One program: one head of one token, of WIDTH splits at most."""
    token = tl.program_id(0).to(tl.int64)
    row = token * NUM_HEADS + tl.program_id(1)
    length = tl.load(seq_lens + token // QUERY_LEN)
    _, tiles, per_split = split_of(length, num_splits, QUERY_LEN, TILE, MIN_TILES, WINDOW)
    split = tl.arange(0, WIDTH)
    column = tl.arange(0, HEAD_PAD)
    is_used = split < tl.cdiv(tiles, per_split)
    lse = tl.load(partial_lse + row * num_splits + split, mask=is_used, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    inside = is_used[:, None] & (column < HEAD_DIM)[None, :]
    place = partial + (row * num_splits + split)[:, None] * HEAD_DIM + column[None, :]
    states = tl.load(place, mask=inside, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(states * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def paged_decode_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sizes: DecodeSizes,
    query_len: int = 1,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """``paged_attention`` of B requests with ``query_len`` queries each, N = B x query_len, into ``out``.

    ``query`` (N, heads, head_dim), a token's heads contiguous; ``out`` (N, heads, head_dim), contiguous; the rest as in
    ``paged_attention``.  Launches the same kernels for every content of ``seq_lens`` and ``block_table``.
    """
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    num_splits = sizes.num_splits
    assert out.is_contiguous() and block_table.stride(1) == 1 and num_tokens == query_len * len(seq_lens)
    constants = layer_constants(query, kv_cache, kv_scales, window)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((*query.shape[:2], num_splits, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((*query.shape[:2], num_splits), dtype=torch.float32, device=query.device)
    ranges = {
        "QUERY_LEN": query_len,
        "TILE": sizes.tile,
        "MIN_TILES": max(1, _MIN_KEYS_PER_SPLIT // sizes.tile),
    }
    paged_decode_kernel[(constants["NUM_KV_HEADS"], num_splits, len(seq_lens))](
        query,
        *cache_arguments(kv_cache, kv_scales),
        block_table,
        seq_lens,
        partial,
        lse,
        scale * LOG2_E,
        query.stride(0),
        block_table.stride(0),
        num_splits,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(query_len * constants["GROUP"])),
        IS_SPLIT=num_splits > 1,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **ranges,
        **constants,
    )
    if num_splits > 1:
        join_splits_kernel[(num_tokens, num_heads)](
            partial,
            lse,
            seq_lens,
            out,
            num_splits,
            NUM_HEADS=num_heads,
            WIDTH=next(width for width in _JOIN_WIDTHS if width >= num_splits),
            **{name: constants[name] for name in ("HEAD_DIM", "HEAD_PAD", "WINDOW")},
            **ranges,
        )


def decode_sizes(
    num_requests: int, num_kv_heads: int, head_dim: int, itemsize: int, num_multiprocessors: int
) -> DecodeSizes:
    """Sizes for a batch on a GPU; ``itemsize`` is that of the query's type.

    The number of splits, a power of two, is what fills the GPU with a batch of this size, whatever its lengths.
    """
    wanted = num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // max(1, num_requests * num_kv_heads)
    num_splits = min(MAX_SPLITS, 1 << max(0, wanted).bit_length() - 1) if wanted > 1 else 1
    head_bytes = triton.next_power_of_2(head_dim) * itemsize
    tile = 64 if head_bytes <= 256 else 32
    return DecodeSizes(tile=tile, num_warps=4, num_stages=5 if head_bytes <= 512 else 2, num_splits=num_splits)
