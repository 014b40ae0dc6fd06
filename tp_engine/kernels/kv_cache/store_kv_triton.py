"""Write new keys and values into the paged cache: the Triton twins of ``layer_kv.store_kv``.

::

    key, value    (N, KV heads, head_dim)    rows may be slices of a wider, merged QKV row
    slot_mapping  (N,)                       -1: nothing is stored
    cache, scales                            as in layer_kv.py

    as they are:  program (i, j) copies elements [j * BLOCK, (j + 1) * BLOCK) of token i's row to slot slot_mapping[i]
    quantised:    program (i, j) stores head j of token i, key and value, as bytes and a scale each
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    begin_program,
    begin_row_block,
    dependent_launch,
    launch_row_blocks,
)
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv

# Adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@jit
def store_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, key_stride, value_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK of the SIZE = KV heads x head_dim elements of one token."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        new_key = tl.load(key + token * key_stride + column, mask=inside)
        new_value = tl.load(value + token * value_stride + column, mask=inside)
        place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * SIZE + column
        tl.store(key_cache + place, new_key.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + place, new_value.to(value_cache.dtype.element_ty), mask=inside)


def store_kv_triton(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """``store_kv`` as one kernel launch: no synchronisation and fixed shapes, so a CUDA graph can hold it."""
    # In a cache with one part, the keys are stored twice, at the same place.
    (key, value), cache, scales = new if len(kv.cache) > 1 else (new.key, new.key), kv.cache, kv.scales
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    for states in (key, value):
        assert states.stride(2) == 1 and states.stride(1) == head_dim, "the heads of a token must be contiguous"
    strides = key.stride(0), value.stride(0)
    block = {"BLOCK_SIZE": cache.shape[2], "BLOCK_STRIDE": kv.block_stride}
    if scales is None:
        arguments = key, value, cache[0], cache[-1], slot_mapping, *strides
        launch_row_blocks(store_kv_kernel, key, num_tokens, num_kv_heads * head_dim, *arguments, **block)
        return
    store_quantised_kv_kernel[(num_tokens, num_kv_heads)](
        key, value, cache[0], cache[-1], scales[0], scales[-1], slot_mapping, *strides,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HEAD_PAD=triton.next_power_of_2(head_dim),
        SCALE_STRIDE=kv.scale_stride, LARGEST=LARGEST_VALUE[cache.dtype], IS_INTEGER=cache.dtype == torch.int8,
        num_warps=1, **block, **dependent_launch(key.device),
    )  # fmt: skip


@jit
def magnitude_bits(states):
    """The bits of float32 ``states`` without their signs: integers of the same order, NaN above all numbers.

    Maxima of floats ignore NaN, unlike the twins: a broken model would get a finite scale.
    """
    return states.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scaled_to_range(states, peak, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """float32 ``states``, ``peak`` their largest magnitude -> values in the type's range, rounded if IS_INTEGER.

    The inverse has PyTorch's two roundings: where many values lie half-way between two, its last bit decides for all.
    """
    inverse = tl.where(peak > 0, tl.div_rn(1.0, tl.where(peak > 0, peak, 1.0)) * LARGEST, 0.0)
    values = tl.minimum(tl.maximum(states * inverse, -LARGEST), LARGEST)
    if IS_INTEGER:
        values = (values + _ROUNDER) - _ROUNDER
    return values


@jit
def store_quantised_head(
    states, cache, scales, slot, head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    """Store ``states`` (HEAD_PAD,) float32, zero from HEAD_DIM on, as ``head`` of the 64-bit ``slot``."""
    peak = tl.max(magnitude_bits(states), axis=0).to(tl.float32, bitcast=True)
    values = scaled_to_range(states, peak, LARGEST, IS_INTEGER)
    column = tl.arange(0, HEAD_PAD)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = cache + block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + head) * HEAD_DIM + column
    tl.store(place, values.to(cache.dtype.element_ty), mask=column < HEAD_DIM)
    tl.store(scales + block * SCALE_STRIDE + head * BLOCK_SIZE + offset, peak / LARGEST)


@jit
def store_quantised_kv_kernel(
    key, value, key_cache, value_cache, key_scales, value_scales, slot_mapping, key_stride, value_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token."""
    begin_program(PDL)
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
