"""The indexer of DeepSeek sparse attention: the Triton twins of ``index_keys``.

::

    prepare      program (i, t), t < tiles    TILE index queries of token i, in place
                 program (i, tiles)           its index key: normalised, rotated, stored

    score        program (i, s)               some tiles of row i's keys: their scores as integers of the same order
    count x 4    program (i, c)               chunk c of row i: how many scores have each value of a byte, among those
                                              that begin as the threshold does; the highest byte first
    write        program (i, c)               the positions of chunk c that row i attends to

The threshold is the score of the last key that is chosen.  Each launch finds one more byte of it, from the counts that
all chunks of the row made in the launch before.  Those of earlier chunks also say where a chunk writes, and how many
keys with the threshold's own score it may take: the earlier ones.

Rows are decodes, or the tokens of prompts.  Grids follow from the number of rows and the width of their block tables;
lengths are read on the device, and programs beyond a row's end do nothing.  A row with no more keys than are chosen is
not scored.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.index_keys import ChosenKeys, KeyNorm
from tp_engine.kernels.attention.latents_triton import load_rotation, rotate_pairs
from tp_engine.kernels.attention.paged_tiles_triton import load_states, places_of, to_float16
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, LayerKv
from tp_engine.kernels.kv_cache.store_kv_triton import magnitude_bits, scaled_to_range
from tp_engine.kernels.sampling.scores_triton import MIN_INT32, ordered_bits

_HEADS_PER_PROGRAM = 16
_MIN_SIZE = 16  # of each side of a matrix product
_SPAN_TILES = 4  # that one program scores, so that it reads its queries once
_CHUNK = 2048  # scores that one program counts
_NUM_PASSES = 4
_BYTE_VALUES = tl.constexpr(256)
_JOINED_CHUNKS = tl.constexpr(16)  # whose counts are read at a time
# Bounds the scores that are in memory at a time: 128 MiB.
_MAX_SCORES = 1 << 25


@jit
def prepare_index_kernel(
    queries, keys, weight, bias, table, positions, out, scales, slot_mapping, query_stride, key_stride, eps,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, INTERLEAVED: tl.constexpr, STORES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one token's index queries, or its key; DIM_PAD and PAIRS are powers of two."""
    begin_program(PDL)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    cos, sin, first, second = load_rotation(table, tl.load(positions + token), pair, HALF, INTERLEAVED)
    if tile * TILE < NUM_HEADS:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        place = queries + token * query_stride + head * DIM
        inside = (head < NUM_HEADS) & (pair < HALF)[None, :]
        a, b = rotate_pairs(place, first[None, :], second[None, :], inside, cos[None, :], sin[None, :])
        tl.store(place + first[None, :], a.to(queries.dtype.element_ty), mask=inside)
        tl.store(place + second[None, :], b.to(queries.dtype.element_ty), mask=inside)
    else:
        slot = token
        if STORES:
            slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            column, inside = tl.arange(0, DIM_PAD), pair < HALF
            is_column = column < DIM
            place = keys + token * key_stride
            key = tl.load(place + column, mask=is_column, other=0.0).to(tl.float32)
            mean = tl.sum(key, axis=0) / DIM
            apart = tl.where(is_column, key - mean, 0.0)
            factor = tl.rsqrt(tl.sum(apart * apart, axis=0) / DIM + eps)
            a = _normed(place, weight, bias, first, inside, mean, factor)
            b = _normed(place, weight, bias, second, inside, mean, factor)
            a, b = a * cos - b * sin, b * cos + a * sin
            is_kept = is_column & (column >= 2 * HALF)
            kept = _normed(place, weight, bias, column, is_kept, mean, factor)
            if LARGEST > 0:
                # Like the twin, which rounds to the model's type before it quantises.
                kept = kept.to(keys.dtype.element_ty).to(tl.float32)
                a, b = a.to(keys.dtype.element_ty).to(tl.float32), b.to(keys.dtype.element_ty).to(tl.float32)
                bits = tl.max(tl.where(inside, tl.maximum(magnitude_bits(a), magnitude_bits(b)), 0), axis=0)
                bits = tl.maximum(bits, tl.max(tl.where(is_kept, magnitude_bits(kept), 0), axis=0))
                peak = bits.to(tl.float32, bitcast=True)
                kept = scaled_to_range(kept, peak, LARGEST, IS_INTEGER)
                a, b = scaled_to_range(a, peak, LARGEST, IS_INTEGER), scaled_to_range(b, peak, LARGEST, IS_INTEGER)
                tl.store(scales + slot // BLOCK_SIZE * SCALE_STRIDE + slot % BLOCK_SIZE, peak / LARGEST)
            cached = out + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * DIM
            tl.store(cached + column, kept.to(out.dtype.element_ty), mask=is_kept)
            tl.store(cached + first, a.to(out.dtype.element_ty), mask=inside)
            tl.store(cached + second, b.to(out.dtype.element_ty), mask=inside)


@jit
def _normed(place, weight, bias, column, inside, mean, factor):
    """The elements ``column`` of the key at ``place``, normalised: float32."""
    key = tl.load(place + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (key - mean) * factor * gain + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["top_k", "table_stride", "width", "first_row"],
    do_not_specialize_on_alignment=["queries", "weights", "block_table", "seq_lens"],
)
@no_type_check
def score_keys_kernel(
    queries, weights, cache, scales, block_table, seq_lens, scores, scale, query_stride, weight_stride, top_k,
    table_stride, width, first_row,
    NUM_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: TILES tiles of one row's keys; ``scores`` (rows, width) int32 from ``first_row`` on."""
    begin_program(PDL)
    own = tl.program_id(0).to(tl.int64)
    row = first_row + own
    start, length = tl.program_id(1) * (TILE * TILES), tl.load(seq_lens + row)
    if (length > top_k) & (start < length):
        head, column = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
        inside = (head < NUM_HEADS)[:, None] & (column < DIM)[None, :]
        place = queries + row * query_stride + head[:, None] * DIM + column[None, :]
        query = tl.load(place, mask=inside, other=0.0)
        if QUANTISED and query.dtype == tl.bfloat16 and cache.dtype.element_ty.is_fp8():
            # As in ``paged_decode_triton``: 8-bit floats are converted to float16.
            query = to_float16(query)
        weight = tl.load(weights + row * weight_stride + head, mask=head < NUM_HEADS, other=0.0) * scale
        table_row = block_table + row * table_stride
        for index in range(tl.minimum(tl.cdiv(length - start, TILE), TILES)):
            first = start + index * TILE
            position = first + tl.arange(0, TILE)
            is_key = position < length
            block_id, offset = places_of(table_row, first, length, TILE, BLOCK_SIZE)
            keys = load_states(cache, block_id * BLOCK_STRIDE + offset * DIM, is_key, True, DIM, DIM_PAD)
            products = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
            total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
            if QUANTISED:
                total *= tl.load(scales + block_id * SCALE_STRIDE + offset, mask=is_key, other=0.0)
            total = tl.where(total == 0.0, 0.0, total)  # zeros of both signs are equal
            # As unsigned numbers, whose bytes have the order of the scores.
            tl.store(scores + own * width + position, ordered_bits(total) ^ MIN_INT32, mask=is_key)


@triton.jit(
    do_not_specialize=["top_k", "num_pass", "width", "num_chunks", "first_row"],
    do_not_specialize_on_alignment=["seq_lens"],
)
@no_type_check
def count_bytes_kernel(
    scores, seq_lens, counts, above, state, top_k, num_pass, width, num_chunks, first_row,
    CHUNK: tl.constexpr, IS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of a row.

    ``counts`` (2, rows, chunks, 256) int32 are this launch's and those of the one before; ``above`` (rows, chunks)
    int32: scores that are certainly above the threshold; ``state`` (rows, passes, 2) int32: the known bytes of the
    threshold before each launch, and how many of the scores that begin with them are to be chosen.
    """
    begin_program(PDL)
    own, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + first_row + own)
    if (length > top_k) & (chunk * CHUNK < length):
        known, wanted, num_above, mask = 0, top_k, 0, 0
        own_counts = counts + (own * num_chunks + chunk) * _BYTE_VALUES
        of_pass = tl.num_programs(0).to(tl.int64) * num_chunks * _BYTE_VALUES
        value = tl.arange(0, _BYTE_VALUES)
        if not IS_FIRST:
            known, wanted, byte = narrowed(counts, state, own, num_pass - 1, tl.cdiv(length, CHUNK), num_chunks)
            before = tl.load(own_counts + (num_pass - 1) % 2 * of_pass + value)
            num_above = tl.sum(tl.where(value > byte, before, 0), axis=0)
            if num_pass > 1:
                num_above += tl.load(above + own * num_chunks + chunk)
            mask = tl.full((), -1, tl.int32) << (32 - 8 * num_pass)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = column < length
        bits = tl.load(scores + own * width + column, mask=inside, other=0)
        found = tl.histogram((bits >> (24 - 8 * num_pass)) & 255, _BYTE_VALUES, mask=inside & ((bits & mask) == known))
        tl.store(own_counts + num_pass % 2 * of_pass + value, found)
        tl.store(above + own * num_chunks + chunk, num_above)
        if chunk == 0:
            tl.store(state + (own * 4 + num_pass) * 2, known)
            tl.store(state + (own * 4 + num_pass) * 2 + 1, wanted)


@jit
def narrowed(counts, state, own, num_pass, num_used, num_chunks):
    """From the counts of row ``own``'s ``num_used`` chunks: the bytes of its threshold that are known after launch
    ``num_pass``, how many of the scores that begin with them are to be chosen, and the byte that the launch has added.
    """
    known, wanted = tl.load(state + (own * 4 + num_pass) * 2), tl.load(state + (own * 4 + num_pass) * 2 + 1)
    value, chunk = tl.arange(0, _BYTE_VALUES), tl.arange(0, _JOINED_CHUNKS)
    first = ((num_pass % 2) * tl.num_programs(0).to(tl.int64) + own) * num_chunks
    total = tl.zeros([_BYTE_VALUES], dtype=tl.int32)
    for start in range(0, num_used, _JOINED_CHUNKS):
        place = counts + (first + start + chunk)[:, None] * _BYTE_VALUES + value[None, :]
        total += tl.sum(tl.load(place, mask=(start + chunk < num_used)[:, None], other=0), axis=0)
    at_least = tl.cumsum(total, axis=0, reverse=True)
    byte = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    known = known | (byte << (24 - 8 * num_pass))
    return known, wanted - tl.sum(tl.where(value > byte, total, 0), axis=0), byte


@triton.jit(
    do_not_specialize=["top_k", "width", "num_chunks", "first_row"], do_not_specialize_on_alignment=["seq_lens"]
)
@no_type_check
def write_chosen_kernel(
    scores, seq_lens, counts, above, state, chosen, num_chosen, top_k, width, num_chunks, first_row,
    CHUNK: tl.constexpr, LAST_PASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the chosen positions of one chunk of a row, into ``chosen`` (rows, top_k); the first chunk's also
    writes ``num_chosen``."""
    begin_program(PDL)
    own, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + own
    length = tl.load(seq_lens + row)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < length
    if chunk == 0:
        tl.store(num_chosen + row, tl.minimum(length, top_k))
    if length <= top_k:
        tl.store(chosen + row * top_k + column, column, mask=inside)
    elif chunk * CHUNK < length:
        threshold, wanted, byte = narrowed(counts, state, own, LAST_PASS, tl.cdiv(length, CHUNK), num_chunks)
        value, other = tl.arange(0, _BYTE_VALUES), tl.arange(0, _JOINED_CHUNKS)
        first = (LAST_PASS % 2 * tl.num_programs(0).to(tl.int64) + own) * num_chunks
        num_above = tl.zeros([_JOINED_CHUNKS], dtype=tl.int32)
        num_equal = tl.zeros([_JOINED_CHUNKS], dtype=tl.int32)
        for start in range(0, chunk, _JOINED_CHUNKS):
            is_before = start + other < chunk
            place = counts + (first + start + other)[:, None] * _BYTE_VALUES + value[None, :]
            found = tl.load(place, mask=is_before[:, None], other=0)
            num_equal += tl.sum(tl.where(value[None, :] == byte, found, 0), axis=1)
            num_above += tl.sum(tl.where(value[None, :] > byte, found, 0), axis=1)
            num_above += tl.load(above + own * num_chunks + start + other, mask=is_before, other=0)
        equal_before = tl.sum(num_equal, axis=0)
        bits = tl.load(scores + own * width + column, mask=inside, other=0)
        is_equal = inside & (bits == threshold)
        is_taken = is_equal & (equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0) <= wanted)
        is_taken = is_taken | (inside & ((bits ^ MIN_INT32) > (threshold ^ MIN_INT32)))
        place = tl.sum(num_above, axis=0) + tl.minimum(equal_before, wanted)
        place += tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
        tl.store(chosen + row * top_k + place, column, mask=is_taken)


def prepare_index_triton(
    queries: torch.Tensor,
    keys: torch.Tensor,
    norm: KeyNorm,
    rotation: Rotation,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``index_keys.prepare_index`` in one launch, which also stores the keys if there is a cache, but not at slot -1.

    No synchronisation and fixed shapes, so a CUDA graph can hold it.  Queries are changed in place and returned.
    """
    num_tokens, num_heads, dim = queries.shape
    rope = rotation.rotary_dim
    assert queries.stride(2) == 1 and queries.stride(1) == dim and keys.stride(1) == 1, "heads must be contiguous"
    assert keys.shape == (num_tokens, dim) and rope % 2 == 0, (keys.shape, queries.shape)
    out = keys.new_empty(num_tokens, dim) if kv is None else kv.cache[0]
    scales = None if kv is None or kv.scales is None else kv.scales[0]
    if num_tokens:
        tile = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
        prepare_index_kernel[(num_tokens, triton.cdiv(num_heads, tile) + 1)](
            queries, keys, norm.weight, norm.bias, rotation.table, rotation.positions, out, scales, slot_mapping,
            queries.stride(0), keys.stride(0), norm.eps,
            NUM_HEADS=num_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), HALF=rope // 2,
            PAIRS=triton.next_power_of_2(rope // 2), TILE=tile, INTERLEAVED=is_interleaved, STORES=kv is not None,
            BLOCK_SIZE=1 if kv is None else kv.cache.shape[2], BLOCK_STRIDE=dim if kv is None else kv.block_stride,
            SCALE_STRIDE=0 if kv is None else kv.scale_stride,
            LARGEST=0.0 if scales is None or kv is None else LARGEST_VALUE[kv.cache.dtype],
            IS_INTEGER=scales is not None and kv is not None and kv.cache.dtype == torch.int8, num_warps=1,
            **dependent_launch(queries.device),
        )  # fmt: skip
    return queries, out if kv is None else None


def choose_keys_triton(
    queries: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    kv: LayerKv,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
) -> ChosenKeys:
    """``index_keys.choose_keys`` in six launches, for all rows, or for each part whose scores fit into memory.

    Positions beyond a row's count are not written.  No synchronisation and fixed shapes, so a CUDA graph can hold it.
    """
    num_rows, num_heads, dim = queries.shape
    device, width = queries.device, block_table.shape[1] * kv.cache.shape[2]
    assert queries.stride(2) == 1 and queries.stride(1) == dim and weights.stride(1) == 1 == block_table.stride(1)
    assert weights.dtype == torch.float32 and kv.cache.shape[3:] == (1, dim), (weights.dtype, kv.cache.shape)

    def room(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    positions, counts = room(num_rows, top_k), room(num_rows)
    step, num_chunks = max(1, _MAX_SCORES // width), triton.cdiv(width, _CHUNK)
    most = min(step, num_rows)
    scores, above, state = room(most, width), room(most, num_chunks), room(most, _NUM_PASSES, 2)
    by_byte = room(2, most, num_chunks, 256)
    tile = 128 if queries.dtype.itemsize <= 2 else 32
    launch = dependent_launch(device)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        score_keys_kernel[(count, triton.cdiv(width, tile * _SPAN_TILES))](
            queries, weights, kv.cache[0], kv.cache[0] if kv.scales is None else kv.scales[0], block_table, seq_lens,
            scores, scale, queries.stride(0), weights.stride(0), top_k, block_table.stride(0), width, first,
            NUM_HEADS=num_heads, HEADS_PAD=max(_MIN_SIZE, triton.next_power_of_2(num_heads)), DIM=dim,
            DIM_PAD=max(_MIN_SIZE, triton.next_power_of_2(dim)), BLOCK_SIZE=kv.cache.shape[2],
            BLOCK_STRIDE=kv.block_stride, SCALE_STRIDE=kv.scale_stride, TILE=tile, TILES=_SPAN_TILES,
            QUANTISED=kv.scales is not None, num_stages=2, **launch,
        )  # fmt: skip
        for num_pass in range(_NUM_PASSES):
            count_bytes_kernel[(count, num_chunks)](
                scores, seq_lens, by_byte, above, state, top_k, num_pass, width, num_chunks, first,
                CHUNK=_CHUNK, IS_FIRST=num_pass == 0, **launch,
            )  # fmt: skip
        write_chosen_kernel[(count, num_chunks)](
            scores, seq_lens, by_byte, above, state, positions, counts, top_k, width, num_chunks, first,
            CHUNK=_CHUNK, LAST_PASS=_NUM_PASSES - 1, **launch,
        )  # fmt: skip
    return ChosenKeys(positions, counts)
