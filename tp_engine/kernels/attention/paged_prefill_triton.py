"""Attention of prompt chunks over the paged cache, which also holds the chunks' own keys and values.

::

    requests first..B of a step      queries q0 .. q(n-1) of a request are the last n of its tokens
    program (h, p)                   BLOCK_Q queries of one request, on KV head h, over all the keys they can see

    p counts the blocks of queries of all requests, one more than needed for most, so that the request of a program
    follows from ``query_start`` alone:   request r begins at p = (query_start[r] - query_start[first]) // BLOCK_Q + r

    keys         |   cached   |chunk|        tiles that all of the block's queries see need no mask
    queries                   |  qq |
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.errors import ConfigError
from tp_engine.kernels.attention.paged_tiles_triton import (
    attend_tile,
    cache_arguments,
    layer_constants,
    score_scale,
    with_sinks,
)
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

# Bytes that server GPUs (sm_80, sm_90, sm_100) have at least; others, such as sm_86 and sm_89, have 99 KiB.
LARGE_SHARED_MEMORY = 160 << 10

_MAX_BLOCKS = 65_535  # of a grid's second dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSizes:
    """``rows`` packed queries and heads of a program, ``tile`` keys at a time, ``num_stages`` tiles in flight."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# As the prefill of a pair of backends it gets slices that begin at the first prefill, and so at any address.
@triton.jit(
    do_not_specialize=["table_stride", "first_request", "num_requests"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start"],
)
@no_type_check
def paged_prefill_kernel(
    query, key_cache, value_cache, key_scales, value_scales, block_table, seq_lens, query_start, sinks, out, scale,
    query_stride, table_stride, first_request, num_requests,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, QUANTISED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Requests ``first_request`` to ``num_requests`` of the step."""
    begin_program(PDL)
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    request, block = request_of(tl.program_id(1), query_start, first_request, num_requests, BLOCK_Q)
    start = tl.load(query_start + request)
    num_queries = tl.load(query_start + request + 1) - start
    first_query = block * BLOCK_Q
    if first_query < num_queries:
        length = tl.load(seq_lens + request)
        line = tl.arange(0, ROWS)
        column = tl.arange(0, HEAD_PAD)
        number = first_query + line // GROUP
        is_query = (line < BLOCK_Q * GROUP) & (number < num_queries)
        inside = is_query[:, None] & (column < HEAD_DIM)[None, :]
        first_token = (start + first_query).to(tl.int64)
        head = kv_head * GROUP + line % GROUP
        place = (line // GROUP * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        states = tl.load(query + first_token * query_stride + place, mask=inside, other=0.0)
        cached = length - num_queries
        own = cached + number

        accumulated = tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        table_row = block_table + request.to(tl.int64) * table_stride
        end = cached + tl.minimum(first_query + BLOCK_Q, num_queries)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(cached + first_query - WINDOW + 1, 0) // TILE * TILE
            seen_by_all = lowest
        else:
            seen_by_all = tl.maximum(cached + first_query + 1, 0) // TILE * TILE
        # fmt: off
        for position in range(lowest, seen_by_all, TILE):
            accumulated, total, peak = attend_tile(
                states, accumulated, total, peak, key_cache, value_cache, key_scales, value_scales, table_row,
                position, length, own, kv_head, scale,
                False, TILE, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, WINDOW,
                QUANTISED, SOFTCAP)
        for position in range(seen_by_all, end, TILE):
            accumulated, total, peak = attend_tile(
                states, accumulated, total, peak, key_cache, value_cache, key_scales, value_scales, table_row,
                position, length, own, kv_head, scale,
                True, TILE, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, WINDOW,
                QUANTISED, SOFTCAP)
        # fmt: on
        if HAS_SINKS:
            accumulated, total, peak = with_sinks(accumulated, total, peak, sinks, head, True)
        result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
        width: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
        place = (line // GROUP * width + head * HEAD_DIM)[:, None] + column[None, :]
        tl.store(out + first_token * width + place, result.to(out.dtype.element_ty), mask=inside)


@jit
def request_of(program, query_start, first_request, num_requests, BLOCK_Q: tl.constexpr):
    """The request of a program, the last one that begins at or before it, and which of its blocks of queries."""
    origin = tl.load(query_start + first_request)
    low, high = first_request, num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin = (tl.load(query_start + middle) - origin) // BLOCK_Q + middle - first_request
        if begin <= program:
            low = middle
        else:
            high = middle - 1
    begin = (tl.load(query_start + low) - origin) // BLOCK_Q + low - first_request
    return low, program - begin


def paged_prefill_triton(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sizes: PrefillSizes,
    num_queries: int,
    first_request: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """``paged_attention`` of the requests from ``first_request`` on, ``num_queries`` tokens in all, into ``out``.

    ``query`` (N, heads, head_dim), a token's heads contiguous; ``out`` (N, heads, head_dim), contiguous: rows of other
    requests are left alone; the rest as in ``paged_attention``.  Raises ``ConfigError`` for more queries than a launch
    can have; the largest step, tried at the start, finds it.
    """
    num_requests = len(seq_lens)
    if num_queries == 0 or first_request == num_requests:
        return
    assert out.is_contiguous() and block_table.stride(1) == 1
    constants = layer_constants(query, kv, window, softcap, sinks)
    group = constants["GROUP"]
    rows = max(sizes.rows, triton.next_power_of_2(group))
    num_blocks = num_queries // (rows // group) + num_requests - first_request
    if num_blocks > _MAX_BLOCKS:
        raise ConfigError(
            f"a step of {num_queries:,} prompt tokens needs {num_blocks:,} programs beside each other, and a GPU has "
            f"at most {_MAX_BLOCKS:,}; lower max_num_batched_tokens"
        )
    paged_prefill_kernel[(constants["NUM_KV_HEADS"], num_blocks)](
        query, *cache_arguments(kv), block_table, seq_lens, query_start, sinks, out, score_scale(scale, softcap),
        query.stride(0), block_table.stride(0), first_request, num_requests,
        ROWS=rows, TILE=sizes.tile, num_warps=sizes.num_warps, num_stages=sizes.num_stages, **constants,
        **dependent_launch(query.device),
    )  # fmt: skip


def prefill_sizes(head_dim: int, itemsize: int, shared_memory: int = LARGE_SHARED_MEMORY) -> PrefillSizes:
    """Sizes for a GPU whose programs have ``shared_memory`` bytes; ``itemsize`` is that of the query's type.

    float32 is for tests: it has no matrix units.
    """
    head_pad = triton.next_power_of_2(head_dim)
    if itemsize > 2:
        size = 32 if head_pad <= 256 else 16
        return PrefillSizes(rows=size, tile=size, num_warps=4, num_stages=1)
    if head_pad > 256:
        # According to the compiled code, more rows, or a larger tile, would not fit into the registers.
        if shared_memory >= LARGE_SHARED_MEMORY:
            return PrefillSizes(rows=64, tile=16, num_warps=8, num_stages=2)
        return PrefillSizes(rows=32, tile=32, num_warps=8, num_stages=1)
    if head_pad <= 128:
        return PrefillSizes(rows=128, tile=64, num_warps=8, num_stages=3)
    return PrefillSizes(rows=128, tile=32, num_warps=8, num_stages=2 if shared_memory >= LARGE_SHARED_MEMORY else 1)
