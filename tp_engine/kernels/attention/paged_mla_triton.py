"""Latent attention over the paged cache, by absorbed queries (``latents.absorb_w_uk``): decodes, and prompt chunks.

::

    query (N, heads, rank + rope)        cached row of a token: [ latent: rank | rope ], one for all heads

    score  = query . row                 two products, because rank + rope (576) is not a power of two
    result = sum of weight * latent      the latents of a tile are read once, for the scores and for the result

    grid (parts of the heads, splits, requests or blocks of queries)
    program's rows    decodes   up to ROWS heads of one query
                      chunks    ROWS // heads queries, all heads of each; or ROWS heads of one query

Every part of the heads reads the rows again, from the second-level cache.  Splits are those of ``paged_decode_triton``:
the grid follows from numbers of requests and tokens, and lengths are read on the device.

Decodes may attend to chosen keys alone (``index_keys_triton``): the i-th key is then at the i-th chosen position.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.arrivals_triton import arrives_last
from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.paged_decode_triton import DecodeSizes, power_of_two_splits, split_of
from tp_engine.kernels.attention.paged_prefill_triton import request_of
from tp_engine.kernels.attention.paged_tiles_triton import add_tile, load_states, places_of, score_scale, to_float16
from tp_engine.kernels.attention.split_parts_triton import join_splits, joined_parts, write_part
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

_MIN_SIZE = 16  # of each side of a matrix product
# The parts of a split are as wide as a latent, and come from many heads: more of them take more memory than they gain.
_PROGRAMS_PER_MULTIPROCESSOR = 1
_MOST_PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes(DecodeSizes):
    """A program has ``most_rows`` rows at most, a power of two.  Without ``can_split`` it has no code for parts of a
    request's keys, and ``num_splits`` is 1."""

    most_rows: int
    can_split: bool = True


# Rows that attend to chosen keys are slices of those that choose, so they begin at any address.
@triton.jit(
    do_not_specialize=[
        "table_stride", "chosen_stride", "usual_splits", "num_splits", "first_request", "num_requests",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start", "chosen"],
)  # fmt: skip
@no_type_check
def paged_latent_kernel(
    query, cache, scales, block_table, seq_lens, query_start, chosen, out, partial, partial_lse, arrivals, scale,
    query_stride, table_stride, chosen_stride, usual_splits, num_splits, first_request, num_requests,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, JOINED_PARTS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TILE: tl.constexpr, LONG_TILES: tl.constexpr,
    IS_CHUNK: tl.constexpr, IS_CHOSEN: tl.constexpr, IS_SPLIT: tl.constexpr, QUANTISED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one split of BLOCK_Q queries on GROUP heads.  Without IS_CHUNK, query i is request i's only one.

    With IS_CHOSEN the keys are at the first ``seq_lens`` positions of the request's row of ``chosen``.  ``out``
    (N, heads, rank) is the result of a single split; more of them go to ``partial``.
    """
    begin_program(PDL)
    part, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, first_query, num_queries = request, 0, 1
    if IS_CHUNK:
        request, block = request_of(request, query_start, first_request, num_requests, BLOCK_Q)
        start = tl.load(query_start + request)
        num_queries = tl.load(query_start + request + 1) - start
        first_query = block * BLOCK_Q
        cached = tl.load(seq_lens + request) - num_queries
        # The keys that the last query sees; none for a block too many, and for padding, whose result is zeros.
        length = tl.maximum(cached + tl.minimum(first_query + BLOCK_Q, num_queries), 0)
        length = tl.where(first_query < num_queries, length, 0)
    else:
        length = tl.load(seq_lens + request)
        cached = length - 1
    _, tiles, per_split = split_of(length, usual_splits, num_splits, 1, TILE, LONG_TILES, 0)
    tile = split * per_split
    end = tl.minimum(tile + per_split, tiles)
    if tile < end or split == 0:
        line, column, turn = tl.arange(0, ROWS), tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
        number = first_query + line // GROUP
        head = part * GROUP + line % GROUP
        is_line = (line < BLOCK_Q * GROUP) & (number < num_queries) & (head < NUM_HEADS)
        inside = is_line[:, None] & (column < RANK)[None, :]
        # Only the first token's place has 64 bits: 64-bit offsets of every element would fill the registers.
        first_token = (start + first_query).to(tl.int64)
        place = query + first_token * query_stride + (line // GROUP * query_stride + head * (RANK + ROPE))[:, None]
        latents = tl.load(place + column[None, :], mask=inside, other=0.0)
        turned = tl.load(place + RANK + turn[None, :], mask=is_line[:, None] & (turn < ROPE)[None, :], other=0.0)
        if QUANTISED and latents.dtype == tl.bfloat16 and cache.dtype.element_ty.is_fp8():
            # As in ``paged_decode_triton``: 8-bit floats are converted to float16.
            latents = to_float16(latents)
            turned = to_float16(turned)

        accumulated = tl.zeros([ROWS, RANK_PAD], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        table_row = block_table + request.to(tl.int64) * table_stride
        for index in range(tile, end):
            position = index * TILE + tl.arange(0, TILE)
            is_key = position < length
            if IS_CHOSEN:
                place_of_key = chosen + request.to(tl.int64) * chosen_stride + position
                key = tl.load(place_of_key, mask=is_key, other=0)
                block_id = tl.load(table_row + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                offset = key % BLOCK_SIZE
            else:
                block_id, offset = places_of(table_row, index * TILE, length, TILE, BLOCK_SIZE)
            row = block_id * BLOCK_STRIDE + offset * (RANK + ROPE)
            values = load_states(cache, row, is_key, True, RANK, RANK_PAD).to(latents.dtype)
            keys = load_states(cache, row + RANK, is_key, True, ROPE, ROPE_PAD).to(latents.dtype)
            scores = tl.dot(latents, tl.trans(values), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scale
            row_scales = 1.0
            if QUANTISED:
                row_scales = tl.load(scales + block_id * SCALE_STRIDE + offset, mask=is_key, other=0.0)
                scores *= row_scales[None, :]
            scores = tl.where(position[None, :] <= (cached + number)[:, None], scores, float("-inf"))
            accumulated, total, peak = add_tile(scores, values, row_scales, accumulated, total, peak, QUANTISED)

        row_of_head = line // GROUP * NUM_HEADS + head
        num_used = tl.cdiv(tiles, per_split)
        # fmt: off
        write_part(accumulated, total, peak, out, partial, partial_lse, first_token * NUM_HEADS, row_of_head,
                   column, inside, is_line, split, num_used, num_splits, RANK, IS_SPLIT)
        if IS_SPLIT and num_used > 1:
            arrived = arrivals + tl.program_id(2) * tl.num_programs(0) + part
            if arrives_last(arrived, num_used):
                join_splits(out, partial, partial_lse, first_token * NUM_HEADS, row_of_head, column, is_line,
                            num_used, num_splits, ROWS, JOINED_PARTS, RANK, RANK_PAD)
        # fmt: on


def mla_decode_triton(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sizes: LatentSizes,
    arrivals: torch.Tensor,
    chosen: ChosenKeys | None = None,
) -> None:
    """``paged_attention`` with a ``value_dim``, of N requests with one query each, into ``out`` (N, heads, rank).

    ``query`` (N, heads, rank + rope), a token's heads contiguous; ``block_table`` (N, M) and ``seq_lens`` (N,) int32;
    ``sizes`` by ``latent_sizes``.  Launches the same kernel for every content of ``seq_lens`` and ``block_table``.
    With ``chosen`` each attends to those keys alone, and their counts replace ``seq_lens``.

    ``arrivals`` (``MAX_ARRIVALS``,) int32 are zeros before and after the launch; launches that may run at the same
    time need their own.
    """
    if len(query):
        group = min(query.shape[1], sizes.most_rows)
        rows = max(_MIN_SIZE, triton.next_power_of_2(group))
        _launch(
            query, kv, block_table, seq_lens, seq_lens, out, arrivals, scale, sizes,
            num_blocks=len(query), first_request=0, is_chunk=False, group=group, rows=rows, block_q=1, chosen=chosen,
        )  # fmt: skip


def mla_chunks_triton(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sizes: LatentSizes,
    arrivals: torch.Tensor,
    num_queries: int,
    first_request: int = 0,
) -> None:
    """Latent attention of the requests from ``first_request`` on, ``num_queries`` tokens in all; others' rows are left
    alone.

    ``query_start`` (B + 1,) int32, the rest as for ``mla_decode_triton``.
    """
    if num_queries:
        rows = sizes.most_rows
        group = min(query.shape[1], rows)
        num_blocks = num_blocks_of_chunks(num_queries, len(seq_lens) - first_request, query.shape[1], rows)
        _launch(
            query, kv, block_table, seq_lens, query_start, out, arrivals, scale, sizes, num_blocks=num_blocks,
            first_request=first_request, is_chunk=True, group=group, rows=rows, block_q=rows // group,
        )  # fmt: skip


def _launch(
    query: torch.Tensor,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    sizes: LatentSizes,
    *,
    num_blocks: int,
    first_request: int,
    is_chunk: bool,
    group: int,
    rows: int,
    block_q: int,
    chosen: ChosenKeys | None = None,
) -> None:
    """``num_blocks`` blocks of ``block_q`` queries, for each of the parts of ``group`` heads, in ``rows`` rows."""
    _, num_heads, row_dim = query.shape
    rank_pad = max(_MIN_SIZE, triton.next_power_of_2(out.shape[2]))
    parts, rank, num_splits = triton.cdiv(num_heads, group), out.shape[2], sizes.num_splits
    assert len(kv.cache) == 1 and kv.cache.shape[3:] == (1, row_dim), (kv.cache.shape, query.shape)
    assert query.stride(2) == 1 and query.stride(1) == row_dim, "a token's heads must be contiguous"
    assert out.is_contiguous() and block_table.stride(1) == 1
    assert num_splits == 1 or sizes.can_split
    assert num_splits == 1 or num_blocks * parts <= len(arrivals), (num_splits, num_blocks, len(arrivals))
    # Chunks, and rows of chosen keys, which may be those of chunks, always take the code for splits, because the number
    # of their tokens differs from step to step.
    is_split = sizes.can_split and (num_splits > 1 or is_chunk or chosen is not None)
    lengths, positions = (seq_lens, seq_lens.view(-1, 1)) if chosen is None else (chosen.counts, chosen.positions)
    partial, lse = out, out
    if is_split:
        width = len(query) if num_splits > 1 else 0
        partial = torch.empty((width, num_heads, num_splits, rank), dtype=torch.float32, device=query.device)
        lse = torch.empty((width, num_heads, num_splits), dtype=torch.float32, device=query.device)
    paged_latent_kernel[(parts, num_splits, num_blocks)](
        query, kv.cache[0], kv.cache[0] if kv.scales is None else kv.scales[0], block_table, lengths, query_start,
        positions, out, partial, lse, arrivals, score_scale(scale, None), query.stride(0), block_table.stride(0),
        positions.stride(0), sizes.usual_splits, num_splits, first_request, len(seq_lens),
        NUM_HEADS=num_heads, GROUP=group, BLOCK_Q=block_q, ROWS=rows,
        JOINED_PARTS=joined_parts(rows, rank_pad, sizes.num_warps), RANK=rank, RANK_PAD=rank_pad, ROPE=row_dim - rank,
        ROPE_PAD=max(_MIN_SIZE, triton.next_power_of_2(row_dim - rank)), BLOCK_SIZE=kv.cache.shape[2],
        BLOCK_STRIDE=kv.block_stride, SCALE_STRIDE=kv.scale_stride, TILE=sizes.tile,
        LONG_TILES=max(1, sizes.long_keys // sizes.tile), IS_CHUNK=is_chunk, IS_CHOSEN=chosen is not None,
        IS_SPLIT=is_split, QUANTISED=kv.scales is not None, num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        **dependent_launch(query.device),
    )  # fmt: skip


def num_blocks_of_chunks(num_queries: int, num_requests: int, num_heads: int, most_rows: int) -> int:
    """Blocks of queries of ``num_requests`` chunks, one more than needed for most (``paged_prefill_triton``)."""
    return num_queries // (most_rows // min(num_heads, most_rows)) + num_requests


def latent_sizes(
    num_requests: int, num_heads: int, itemsize: int, num_multiprocessors: int, *, num_queries: int | None = None
) -> LatentSizes:
    """Sizes for decodes of ``num_requests``, or for their chunks of ``num_queries`` in all.

    ``itemsize`` is that of the query's type; float32 is for tests.  The numbers of splits, powers of two, do not depend
    on lengths.  According to the compiled code, more rows would not fit into the registers where parts are joined; rows
    and tile take 74 KiB of shared memory, which every GPU from 8.0 on has.  They have not been timed.
    """
    tile, num_warps, num_stages, most_rows = 32, 8, 2, 32
    if num_queries is None and num_heads <= _MIN_SIZE:
        num_stages = 3  # ptxas of Triton 3.8 spills 8 bytes of 128 registers with two
    if itemsize > 2:
        tile, num_stages, most_rows = _MIN_SIZE, 1, _MIN_SIZE
    num_blocks = num_requests
    if num_queries is not None:
        num_blocks = num_blocks_of_chunks(num_queries, num_requests, num_heads, most_rows)
    num_programs = max(1, num_blocks * -(-num_heads // most_rows))
    usual = power_of_two_splits(num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // num_programs)
    most = power_of_two_splits(num_multiprocessors * _MOST_PROGRAMS_PER_MULTIPROCESSOR // num_programs)
    return LatentSizes(
        tile=tile, num_warps=num_warps, num_stages=num_stages, most_rows=most_rows, usual_splits=usual, num_splits=most
    )


def wide_latent_sizes() -> LatentSizes:
    """Sizes for chunks of many tokens, of 16 bits: what a group of four warps multiplies at a time (wgmma on Hopper,
    tcgen05 on Blackwell) has 64 rows, so ``latent_sizes`` never meets these units.

    By compiled code 64 rows and 32 keys fit into the registers of 8 warps, but not with the code that joins parts
    beside them.  They take 144 KiB of shared memory on Hopper and 209 KiB on Blackwell.  No device has timed them.
    """
    return LatentSizes(tile=32, num_warps=8, num_stages=2, most_rows=64, usual_splits=1, num_splits=1, can_split=False)
