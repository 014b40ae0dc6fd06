"""Norm, rotation and the store of K/V in one pass: the Triton twin of ``heads.qk_norm_rope_store``.

::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]      queries are changed in place
    program (i, t), t < query tiles:  queries [t * TILE, (t + 1) * TILE) of token i
    program (i, t), the others:       TILE keys, stored at their slot (without a cache: in place), and their values
    cache, scales                     as in layer_kv.py

    a head    | a: rotary_dim / 2 | b: rotary_dim / 2 | c: the rest |      element j of a is paired with element j of b

A program holds each part of a tile of heads as one matrix; c only if it exists.  If nothing is rotated, a and b are the
halves of the head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tp_engine.kernels.attention.heads import HeadNorm, Heads, Rotation
from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, LayerKv
from tp_engine.kernels.kv_cache.store_kv_triton import magnitude_bits, scaled_to_range

_PAIRS_PER_PROGRAM = 512
_PAIRS_PER_THREAD = 8


@jit
def load_parts(place, pair, rest, is_head, HALF: tl.constexpr, REST: tl.constexpr):
    """Parts a, b and c, float32, of the heads at ``place``; zeros outside.  ``is_head`` masks rows of a tile."""
    inside = is_head & (pair < HALF)
    a = tl.load(place + pair, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + pair + HALF, mask=inside, other=0.0).to(tl.float32)
    c = a
    if REST > 0:
        c = tl.load(place + 2 * HALF + rest, mask=is_head & (rest < REST), other=0.0).to(tl.float32)
    return a, b, c


@jit
def _store_parts(a, b, c, place, pair, rest, is_head, HALF: tl.constexpr, REST: tl.constexpr):
    """The inverse of ``load_parts``, in the type of ``place``."""
    inside = is_head & (pair < HALF)
    tl.store(place + pair, a.to(place.dtype.element_ty), mask=inside)
    tl.store(place + pair + HALF, b.to(place.dtype.element_ty), mask=inside)
    if REST > 0:
        tl.store(place + 2 * HALF + rest, c.to(place.dtype.element_ty), mask=is_head & (rest < REST))


@jit
def store_in_cache(
    a, b, c, cache, scales, slot, head, pair, rest, is_head,
    HALF: tl.constexpr, REST: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    """Store the parts, float32, of KV heads ``head`` (TILE, 1) where ``is_head``, quantised where LARGEST is not 0."""
    if LARGEST > 0:
        bits = tl.max(tl.maximum(magnitude_bits(a), magnitude_bits(b)), axis=1)
        if REST > 0:
            bits = tl.maximum(bits, tl.max(magnitude_bits(c), axis=1))
        peak = bits.to(tl.float32, bitcast=True)[:, None]
        a, b = scaled_to_range(a, peak, LARGEST, IS_INTEGER), scaled_to_range(b, peak, LARGEST, IS_INTEGER)
        if REST > 0:
            c = scaled_to_range(c, peak, LARGEST, IS_INTEGER)
        scale = scales + slot // BLOCK_SIZE * SCALE_STRIDE + head * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scale, peak / LARGEST, mask=head < NUM_KV_HEADS)
    offset = slot % BLOCK_SIZE * NUM_KV_HEADS + head
    place = cache + slot // BLOCK_SIZE * BLOCK_STRIDE + offset * (2 * HALF + REST)
    _store_parts(a, b, c, place, pair, rest, is_head, HALF, REST)


@jit
def _normalise_parts(a, b, c, weight, eps, pair, rest, HALF: tl.constexpr, REST: tl.constexpr, OFFSET: tl.constexpr):
    """RMS norm of each head of the tile by ``weight`` (head_dim,) + OFFSET."""
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if REST > 0:
        squares += tl.sum(c * c, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
    gain_a, gain_b, gain_c = load_parts(weight, pair, rest, True, HALF, REST)
    if OFFSET != 0:
        gain_a, gain_b, gain_c = gain_a + OFFSET, gain_b + OFFSET, gain_c + OFFSET
    a *= scale * gain_a
    b *= scale * gain_b
    if REST > 0:
        c *= scale * gain_c
    return a, b, c


@jit
def prepared_parts(
    place, weight, eps, table, positions, token, pair, rest, is_head,
    HALF: tl.constexpr, REST: tl.constexpr, NORMALISES: tl.constexpr, OFFSET: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Parts, float32, of the queries or keys of ``token`` at ``place``, normalised and rotated."""
    a, b, c = load_parts(place, pair, rest, is_head, HALF, REST)
    if NORMALISES:
        a, b, c = _normalise_parts(a, b, c, weight, eps, pair, rest, HALF, REST, OFFSET)
    if TURNS:
        angle = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b, c


@jit
def qk_norm_rope_store_kernel(
    heads, norm_weights, table, positions, query_scale, key_cache, value_cache, key_scales, value_scales, slot_mapping,
    token_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, REST_PAD: tl.constexpr, NORMALISES: tl.constexpr, NORMALISES_VALUES: tl.constexpr,
    OFFSET: tl.constexpr, TURNS: tl.constexpr, SCALES_QUERY: tl.constexpr, STORES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one tile of one token's heads; PAIRS and REST_PAD are HALF and REST, rounded up to powers of two."""
    begin_program(PDL)
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    QUERY_TILES: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = tile < QUERY_TILES
    lane, pair, rest = tl.arange(0, TILE)[:, None], tl.arange(0, PAIRS)[None, :], tl.arange(0, REST_PAD)[None, :]
    first_head = tl.where(is_query, tile * TILE, NUM_HEADS + (tile - QUERY_TILES) * TILE)
    is_head = first_head + lane < tl.where(is_query, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS)

    place = heads + token * token_stride + (first_head + lane) * HEAD_DIM
    weight = norm_weights + tl.where(is_query, 0, NUM_HEADS * HEAD_DIM)
    # fmt: off
    a, b, c = prepared_parts(place, weight, eps, table, positions, token, pair, rest, is_head,
                             HALF, REST, NORMALISES, OFFSET, TURNS)
    # fmt: on
    if SCALES_QUERY:
        factor = tl.where(is_query, tl.load(query_scale + tl.load(positions + token)), 1.0)
        a, b, c = a * factor, b * factor, c * factor

    value = place + NUM_KV_HEADS * HEAD_DIM
    weight = norm_weights + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
    if is_query or not STORES:
        _store_parts(a, b, c, place, pair, rest, is_head, HALF, REST)
        if NORMALISES_VALUES and not is_query:
            a, b, c = load_parts(value, pair, rest, is_head, HALF, REST)
            a, b, c = _normalise_parts(a, b, c, weight, eps, pair, rest, HALF, REST, OFFSET)
            _store_parts(a, b, c, value, pair, rest, is_head, HALF, REST)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = first_head - NUM_HEADS + lane
            value_a, value_b, value_c = load_parts(value, pair, rest, is_head, HALF, REST)
            if NORMALISES_VALUES:
                value_a, value_b, value_c = _normalise_parts(
                    value_a, value_b, value_c, weight, eps, pair, rest, HALF, REST, OFFSET
                )
            # fmt: off
            store_in_cache(a, b, c, key_cache, key_scales, slot, head, pair, rest, is_head,
                            HALF, REST, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, LARGEST, IS_INTEGER)
            store_in_cache(value_a, value_b, value_c, value_cache, value_scales, slot, head, pair, rest, is_head,
                            HALF, REST, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, LARGEST, IS_INTEGER)
            # fmt: on


def qk_norm_rope_store_triton(
    heads: torch.Tensor,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> Heads:
    """``heads.qk_norm_rope_store`` in one launch, which also stores K/V if there is a cache; a slot of -1 is not
    stored.

    No synchronisation and fixed shapes, so a CUDA graph can hold it.  The query is a view of ``heads``.
    """
    num_tokens, num_all, head_dim = heads.shape
    num_heads = num_all - 2 * num_kv_heads
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim and head_dim % 2 == 0, (heads.shape, heads.stride())
    if num_tokens:
        cache, form = _cache_arguments(heads, kv)
        constants = {**_head_constants(heads, num_kv_heads, rotation), **form}
        tile = constants["TILE"]
        qk_norm_rope_store_kernel[(num_tokens, triton.cdiv(num_heads, tile) + triton.cdiv(num_kv_heads, tile))](
            heads, heads if norm is None else norm.weights, None if rotation is None else rotation.table,
            None if rotation is None else rotation.positions, None if rotation is None else rotation.query_scale,
            *cache, slot_mapping, heads.stride(0), 0.0 if norm is None else norm.eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, NORMALISES=norm is not None,
            NORMALISES_VALUES=norm is not None and norm.includes_values, OFFSET=0.0 if norm is None else norm.offset,
            **constants, **dependent_launch(heads.device),
        )  # fmt: skip
    query = heads[:, :num_heads]
    if kv is not None:
        return query, None, None
    return query, heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]


def _head_constants(heads: torch.Tensor, num_kv_heads: int, rotation: Rotation | None) -> dict[str, Any]:
    """The parts of a head, and the heads and warps of a program."""
    _, num_all, head_dim = heads.shape
    rotary_dim = 0 if rotation is None else rotation.rotary_dim
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim, (rotary_dim, head_dim)
    half, rest = (rotary_dim or head_dim) // 2, head_dim - rotary_dim if rotary_dim else 0
    pairs_of_head = int(triton.next_power_of_2(head_dim // 2))
    most_heads = int(triton.next_power_of_2(max(num_all - 2 * num_kv_heads, num_kv_heads)))
    tile = min(max(_PAIRS_PER_PROGRAM // pairs_of_head, 1), most_heads)
    return {
        "HALF": half,
        "REST": rest,
        "TILE": tile,
        "PAIRS": triton.next_power_of_2(half),
        "REST_PAD": triton.next_power_of_2(max(rest, 1)),
        "TURNS": rotary_dim > 0,
        "SCALES_QUERY": rotation is not None and rotation.query_scale is not None,
        "num_warps": max(1, tile * pairs_of_head // (32 * _PAIRS_PER_THREAD)),
    }


def _cache_arguments(heads: torch.Tensor, kv: LayerKv | None) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Keys, values and their scales, and whether and how they are stored; ``heads`` stands in for those that do not
    exist, and is not read."""
    constants = {"STORES": kv is not None, "BLOCK_SIZE": 1, "BLOCK_STRIDE": 0, "SCALE_STRIDE": 0}
    if kv is None:
        return (heads,) * 4, {**constants, "LARGEST": 0.0, "IS_INTEGER": False}
    constants |= {"BLOCK_SIZE": kv.cache.shape[2], "BLOCK_STRIDE": kv.block_stride, "SCALE_STRIDE": kv.scale_stride}
    scales = (heads, heads) if kv.scales is None else kv.scales.unbind(0)
    largest = 0.0 if kv.scales is None else LARGEST_VALUE[kv.cache.dtype]
    form = {"LARGEST": largest, "IS_INTEGER": kv.cache.dtype == torch.int8}
    return (*kv.cache.unbind(0), *scales), {**constants, **form}
