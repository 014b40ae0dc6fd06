"""Norm, rotation and the store of K/V in one pass: the Triton twin of ``rope.prepare_heads``.

::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]      queries are changed in place
    program (i, t), t < query tiles:  queries [t * TILE, (t + 1) * TILE) of token i
    program (i, t), the others:       as many keys, stored at their slot (without a cache: in place), and their values
    cache, scales                     as in kv_quant.py

A head is held as its two halves, (TILE, head_dim / 2) each, because element j turns with element j + head_dim / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.kv_quant import LARGEST_VALUE
from tp_engine.kernels.kv_quant_triton import scaled_to_range
from tp_engine.kernels.layer_kv import LayerKv
from tp_engine.kernels.rope import HeadNorm, Heads, Rotation

_PAIRS_PER_PROGRAM = 512
_PAIRS_PER_THREAD = 8


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(  # type: ignore[no-untyped-def]
    a,
    b,
    cache,
    scales,
    slot,
    head,
    pair,
    inside,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    IS_INTEGER: tl.constexpr,  # noqa: N803
):
    """Store both halves (TILE, PAIRS) float32 of KV heads ``head`` (TILE, 1), quantised where LARGEST is not 0."""
    if LARGEST > 0:
        peak = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))[:, None]
        a, b = scaled_to_range(a, peak, LARGEST, IS_INTEGER), scaled_to_range(b, peak, LARGEST, IS_INTEGER)
        scale = scales + (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scale, peak / LARGEST, mask=head < NUM_KV_HEADS)
    place = cache + (slot * NUM_KV_HEADS + head) * HEAD_DIM + pair
    tl.store(place, a.to(cache.dtype.element_ty), mask=inside)
    tl.store(place + HEAD_DIM // 2, b.to(cache.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def prepare_heads_kernel(  # type: ignore[no-untyped-def]
    heads,
    norm_weights,
    table,
    positions,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    token_stride,
    eps,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    NORMALISES: tl.constexpr,  # noqa: N803
    STORES: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    IS_INTEGER: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: one tile of one token's heads; PAIRS is head_dim / 2, rounded up to a power of two."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2  # noqa: N806
    QUERY_TILES: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE  # noqa: N806
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = tile < QUERY_TILES
    lane, pair = tl.arange(0, TILE)[:, None], tl.arange(0, PAIRS)[None, :]
    first_head = tl.where(is_query, tile * TILE, NUM_HEADS + (tile - QUERY_TILES) * TILE)
    in_half = pair < HALF
    inside = (first_head + lane < tl.where(is_query, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS)) & in_half

    place = heads + token * token_stride + (first_head + lane) * HEAD_DIM + pair
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMALISES:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
        weight = norm_weights + tl.where(is_query, 0, NUM_HEADS * HEAD_DIM) + pair
        a *= scale * tl.load(weight, mask=in_half, other=0.0).to(tl.float32)
        b *= scale * tl.load(weight + HALF, mask=in_half, other=0.0).to(tl.float32)
    angle = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + pair
    cos = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=in_half, other=0.0).to(tl.float32)
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin

    if is_query or not STORES:
        tl.store(place, turned_a.to(heads.dtype.element_ty), mask=inside)
        tl.store(place + HALF, turned_b.to(heads.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = first_head - NUM_HEADS + lane
            value = place + NUM_KV_HEADS * HEAD_DIM
            value_a = tl.load(value, mask=inside, other=0.0).to(tl.float32)
            value_b = tl.load(value + HALF, mask=inside, other=0.0).to(tl.float32)
            # fmt: off
            _store_halves(turned_a, turned_b, key_cache, key_scales, slot, head, pair, inside,
                          NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, LARGEST, IS_INTEGER)
            _store_halves(value_a, value_b, value_cache, value_scales, slot, head, pair, inside,
                          NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, LARGEST, IS_INTEGER)
            # fmt: on


def prepare_heads_triton(
    heads: torch.Tensor,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> Heads:
    """``rope.prepare_heads`` in one launch, which stores K/V where there is a cache; a slot of -1 is not stored.

    No synchronisation and fixed shapes, so a CUDA graph can hold it.  The query is a view of ``heads``.
    """
    num_tokens, num_all, head_dim = heads.shape
    num_heads = num_all - 2 * num_kv_heads
    assert norm is None or norm.offset == 0.0, norm
    assert rotation is not None and rotation.rotary_dim == head_dim and rotation.query_scale is None, rotation
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim and head_dim % 2 == 0, (heads.shape, heads.stride())
    # Pointers that are not read are some other tensor's.
    keys, values = (heads, heads) if kv is None else kv.cache.unbind(0)
    key_scales, value_scales = (heads, heads) if kv is None or kv.scales is None else kv.scales.unbind(0)
    assert kv is None or (keys.is_contiguous() and values.is_contiguous()), "a layer's keys must be contiguous"
    pairs = int(triton.next_power_of_2(head_dim // 2))
    tile = min(max(_PAIRS_PER_PROGRAM // pairs, 1), int(triton.next_power_of_2(max(num_heads, num_kv_heads))))
    if num_tokens:
        prepare_heads_kernel[(num_tokens, triton.cdiv(num_heads, tile) + triton.cdiv(num_kv_heads, tile))](
            heads,
            heads if norm is None else norm.weights,
            rotation.table,
            rotation.positions,
            keys,
            values,
            key_scales,
            value_scales,
            slot_mapping,
            heads.stride(0),
            0.0 if norm is None else norm.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            TILE=tile,
            PAIRS=pairs,
            NORMALISES=norm is not None,
            STORES=kv is not None,
            BLOCK_SIZE=1 if kv is None else kv.cache.shape[2],
            LARGEST=0.0 if kv is None or kv.scales is None else LARGEST_VALUE[keys.dtype],
            IS_INTEGER=keys.dtype == torch.int8,
            num_warps=max(1, tile * pairs // (32 * _PAIRS_PER_THREAD)),
            **dependent_launch(heads.device),
        )
    query = heads[:, :num_heads]
    if kv is not None:
        return query, None, None
    return query, heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
