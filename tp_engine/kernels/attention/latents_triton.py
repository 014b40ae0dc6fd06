"""Rotation of queries; norm, rotation and store of rows: the Triton twin of ``latents.prepare_latents``.

::

    query (N, heads, nope + rope)    changed in place: the rope part is rotated; where queries are scaled, all of it
    rows (N, rank + rope)            stored at their slot, or without a cache in a new tensor
    program (i, t), t < tiles        TILE heads of token i's query
    program (i, tiles)               its row
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, LayerKv
from tp_engine.kernels.kv_cache.store_kv_triton import magnitude_bits, scaled_to_range
from tp_engine.kernels.layer_ops import NormRule

_HEADS_PER_PROGRAM = 16


@jit
def load_rotation(table, position, pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The cosine and the sine, float32, of each ``pair`` at ``position``, and its two elements."""
    angle = table + position.to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    first, second = pair, pair + HALF
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    return cos, sin, first, second


@jit
def rotate_pairs(place, step, other, inside, cos, sin):
    """The pairs of elements ``step`` and ``other`` at ``place``, rotated: float32."""
    a = tl.load(place + step, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + other, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@jit
def prepare_latents_kernel(
    query, rows, weight, table, positions, query_scale, out, scales, slot_mapping, query_stride, row_stride, eps,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    HALF: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    TURNS: tl.constexpr, SCALES_QUERY: tl.constexpr, STORES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one token's heads, or its row; NOPE_PAD, RANK_PAD and PAIRS are powers of two."""
    begin_program(PDL)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    if TURNS:
        position = tl.load(positions + token).to(tl.int64)
        cos, sin, first, second = load_rotation(table, position, pair, HALF, INTERLEAVED)
    else:
        position, cos, sin = token, tl.full((PAIRS,), 1.0, tl.float32), tl.zeros((PAIRS,), tl.float32)
        first, second = pair, pair + HALF
    if tile * TILE < NUM_HEADS:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        place = query + token * query_stride + head * (NOPE + 2 * HALF)
        inside = (head < NUM_HEADS) & (pair < HALF)[None, :]
        a, b = rotate_pairs(place + NOPE, first[None, :], second[None, :], inside, cos[None, :], sin[None, :])
        if SCALES_QUERY:
            factor = tl.load(query_scale + position)
            a, b = a * factor, b * factor
            column = tl.arange(0, NOPE_PAD)[None, :]
            is_kept = (head < NUM_HEADS) & (column < NOPE)
            kept = tl.load(place + column, mask=is_kept, other=0.0).to(tl.float32)
            tl.store(place + column, (kept * factor).to(query.dtype.element_ty), mask=is_kept)
        tl.store(place + NOPE + first[None, :], a.to(query.dtype.element_ty), mask=inside)
        tl.store(place + NOPE + second[None, :], b.to(query.dtype.element_ty), mask=inside)
    else:
        slot = token
        if STORES:
            slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            column, inside = tl.arange(0, RANK_PAD), pair < HALF
            place = rows + token * row_stride
            latent = tl.load(place + column, mask=column < RANK, other=0.0).to(tl.float32)
            gain = tl.load(weight + column, mask=column < RANK, other=0.0).to(tl.float32) + OFFSET
            latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps) * gain
            a, b = rotate_pairs(place + RANK, first, second, inside, cos, sin)
            if LARGEST > 0:
                # Like the twin, which rounds to the model's type before it quantises.
                latent = latent.to(rows.dtype.element_ty).to(tl.float32)
                a, b = a.to(rows.dtype.element_ty).to(tl.float32), b.to(rows.dtype.element_ty).to(tl.float32)
                bits = tl.max(tl.maximum(magnitude_bits(a), magnitude_bits(b)), axis=0)
                bits = tl.maximum(bits, tl.max(tl.where(column < RANK, magnitude_bits(latent), 0), axis=0))
                peak = bits.to(tl.float32, bitcast=True)
                latent = scaled_to_range(latent, peak, LARGEST, IS_INTEGER)
                a, b = scaled_to_range(a, peak, LARGEST, IS_INTEGER), scaled_to_range(b, peak, LARGEST, IS_INTEGER)
                tl.store(scales + slot // BLOCK_SIZE * SCALE_STRIDE + slot % BLOCK_SIZE, peak / LARGEST)
            cached = out + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * (RANK + 2 * HALF)
            tl.store(cached + column, latent.to(out.dtype.element_ty), mask=column < RANK)
            tl.store(cached + RANK + first, a.to(out.dtype.element_ty), mask=inside)
            tl.store(cached + RANK + second, b.to(out.dtype.element_ty), mask=inside)


def prepare_latents_triton(
    query: torch.Tensor,
    rows: torch.Tensor,
    rule: NormRule,
    rotation: Rotation | None,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``latents.prepare_latents`` in one launch, which also stores the rows if there is a cache, but not at slot -1.

    No synchronisation and fixed shapes, so a CUDA graph can hold it.  The query is changed in place and returned.
    """
    num_tokens, num_heads, query_dim = query.shape
    rank = len(rule.weight)
    rope = rows.shape[1] - rank
    turning = (None,) * 3 if rotation is None else (rotation.table, rotation.positions, rotation.query_scale)
    assert query.stride(2) == 1 and query.stride(1) == query_dim and rows.stride(1) == 1, "rows must be contiguous"
    assert rows.shape == (num_tokens, rank + rope) and rope % 2 == 0 and not rule.is_centred
    out = rows.new_empty(num_tokens, 1, rank + rope) if kv is None else kv.cache[0]
    scales = None if kv is None or kv.scales is None else kv.scales[0]
    if num_tokens:
        tile = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
        prepare_latents_kernel[(num_tokens, triton.cdiv(num_heads, tile) + 1)](
            query, rows, rule.weight, *turning, out, scales,
            slot_mapping, query.stride(0), rows.stride(0), rule.eps,
            NUM_HEADS=num_heads, NOPE=query_dim - rope, NOPE_PAD=triton.next_power_of_2(max(query_dim - rope, 1)),
            RANK=rank, RANK_PAD=triton.next_power_of_2(rank), HALF=rope // 2, PAIRS=triton.next_power_of_2(rope // 2),
            TILE=tile, OFFSET=rule.offset, INTERLEAVED=is_interleaved, TURNS=rotation is not None,
            SCALES_QUERY=turning[2] is not None,
            STORES=kv is not None, BLOCK_SIZE=1 if kv is None else kv.cache.shape[2],
            BLOCK_STRIDE=rank + rope if kv is None else kv.block_stride,
            SCALE_STRIDE=0 if kv is None else kv.scale_stride,
            LARGEST=0.0 if scales is None or kv is None else LARGEST_VALUE[kv.cache.dtype],
            IS_INTEGER=scales is not None and kv is not None and kv.cache.dtype == torch.int8,
            **dependent_launch(query.device),
        )  # fmt: skip
    return query, out if kv is None else None
