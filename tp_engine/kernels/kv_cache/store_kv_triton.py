"""Write new keys and values into the paged cache: the Triton twins of ``layer_kv.store_kv``.

::

    key, value    (N, KV heads, head_dim)    rows may be slices of a wider, merged QKV row
    slot_mapping  (N,)                       -1: nothing is stored
    cache, scales                            as in layer_kv.py

    as they are:  program (i, j) copies elements [j * BLOCK, (j + 1) * BLOCK) of token i's row to slot slot_mapping[i]
    quantised:    program (i, j) stores head j of token i, key and value, as bytes and a scale each
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv

_MAX_BLOCK = 1024
# Adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@jit
def store_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to BLOCK of the WIDTH = KV heads x head_dim elements of one token."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    # 64 bits: a large cache holds more than 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        new_key = tl.load(key + token * key_stride + column, mask=inside)
        new_value = tl.load(value + token * value_stride + column, mask=inside)
        place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * WIDTH + column
        tl.store(key_cache + place, new_key.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + place, new_value.to(value_cache.dtype.element_ty), mask=inside)


def store_kv_triton(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """``store_kv`` as one kernel launch: no synchronisation and fixed shapes, so a CUDA graph can hold it."""
    if kv.scales is not None:
        store_quantised_kv_triton(new, kv, slot_mapping)
        return
    (key, value), cache = _in_parts(new, kv), kv.cache
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    for states in (key, value):
        assert states.stride(2) == 1 and states.stride(1) == head_dim, "the heads of a token must be contiguous"
    width = num_kv_heads * head_dim
    block = block_for(width)
    store_kv_kernel[(num_tokens, triton.cdiv(width, block))](
        key, value, cache[0], cache[-1], slot_mapping, key.stride(0), value.stride(0), WIDTH=width,
        BLOCK_SIZE=cache.shape[2], BLOCK_STRIDE=kv.block_stride, BLOCK=block, **dependent_launch(key.device),
    )  # fmt: skip


def _in_parts(new: KeyValue, kv: LayerKv) -> KeyValue:
    """``new`` for the parts of the cache: of a cache with one part, the keys twice, which go to the same place."""
    return new if len(kv.cache) > 1 else KeyValue(new.key, new.key)


def block_for(width: int) -> int:
    """Elements per program for rows of ``width`` elements: a power of two."""
    return min(int(triton.next_power_of_2(width)), _MAX_BLOCK)


@jit
def magnitude_bits(states):
    """float32 ``states`` without their signs, as integers of the same order, in which NaN is above all numbers.

    Maxima of floats leave NaN out, as the twins do not: a broken model would get a finite scale.
    """
    return states.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scaled_to_range(states, peak, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """float32 ``states``, ``peak`` their largest magnitude -> values in the type's range, rounded where IS_INTEGER."""
    inverse = tl.where(peak > 0, LARGEST / tl.where(peak > 0, peak, 1.0), 0.0)
    values = tl.minimum(tl.maximum(states * inverse, -LARGEST), LARGEST)
    if IS_INTEGER:
        values = (values + _ROUNDER) - _ROUNDER
    return values


@jit
def quantise_head(states, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """One head's ``states`` (head_dim, then zeros) float32 -> float32 values in the type's range, and the scale.

    The caller casts the values to the cache's type, which rounds floats; integers are rounded here.
    """
    peak = tl.max(magnitude_bits(states), axis=0).to(tl.float32, bitcast=True)
    values = scaled_to_range(states, peak, LARGEST, IS_INTEGER)
    return values, peak / LARGEST


@jit
def store_quantised_head(
    states,
    cache,
    scales,
    slot,
    head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Store ``states`` (HEAD_PAD,) float32, zero from HEAD_DIM on, as ``head`` of the 64-bit ``slot``."""
    values, scale = quantise_head(states, LARGEST, IS_INTEGER)
    column = tl.arange(0, HEAD_PAD)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = cache + block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + head) * HEAD_DIM + column
    tl.store(place, values.to(cache.dtype.element_ty), mask=column < HEAD_DIM)
    tl.store(scales + block * SCALE_STRIDE + head * BLOCK_SIZE + offset, scale)


@jit
def store_quantised_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """One program: one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, HEAD_PAD)
        inside = column < HEAD_DIM
        new_key = tl.load(key + token * key_stride + head * HEAD_DIM + column, mask=inside, other=0.0)
        new_value = tl.load(value + token * value_stride + head * HEAD_DIM + column, mask=inside, other=0.0)
        # fmt: off
        store_quantised_head(new_key.to(tl.float32), key_cache, key_scales, slot, head,
                             NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, LARGEST,
                             IS_INTEGER)
        store_quantised_head(new_value.to(tl.float32), value_cache, value_scales, slot, head,
                             NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_STRIDE, SCALE_STRIDE, LARGEST,
                             IS_INTEGER)
        # fmt: on


def store_quantised_kv_triton(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """``store_kv`` of a quantised cache as one kernel launch, which a CUDA graph can hold."""
    (key, value), kv_cache, kv_scales = _in_parts(new, kv), kv.cache, kv.scales
    assert kv_scales is not None
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    for states in (key, value):
        assert states.stride(2) == 1 and states.stride(1) == head_dim, "the heads of a token must be contiguous"
    store_quantised_kv_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        kv_cache[0],
        kv_cache[-1],
        kv_scales[0],
        kv_scales[-1],
        slot_mapping,
        key.stride(0),
        value.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK_STRIDE=kv.block_stride,
        SCALE_STRIDE=kv.scale_stride,
        LARGEST=LARGEST_VALUE[kv_cache.dtype],
        IS_INTEGER=kv_cache.dtype == torch.int8,
        num_warps=1,
    )
