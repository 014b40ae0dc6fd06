"""Write new keys and values into the paged cache: the Triton twin of ``store_kv``.

::

    key, value    (N, KV heads, head_dim)    rows may be slices of a wider, merged QKV row
    slot_mapping  (N,)                       -1: nothing is stored
    K and V cache (slots, KV heads, head_dim), contiguous

    program (i, j) copies elements [j * BLOCK, (j + 1) * BLOCK) of token i's row to row slot_mapping[i]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.kv_quant_triton import store_quantised_kv_triton
from tp_engine.kernels.layer_kv import KeyValue, LayerKv

_MAX_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def store_kv_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
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
        tl.store(key_cache + slot * WIDTH + column, new_key.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + slot * WIDTH + column, new_value.to(value_cache.dtype.element_ty), mask=inside)


def store_kv_triton(new: KeyValue, kv: LayerKv, slot_mapping: torch.Tensor) -> None:
    """``store_kv`` as one kernel launch: no synchronisation and fixed shapes, so a CUDA graph can hold it."""
    if kv.scales is not None:
        store_quantised_kv_triton(new, kv.cache, kv.scales, slot_mapping)
        return
    (key, value), cache = new, kv.cache
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    for states in (key, value):
        assert states.stride(2) == 1 and states.stride(1) == head_dim, "the heads of a token must be contiguous"
    assert cache[0].is_contiguous(), "one layer's keys must be contiguous"
    width = num_kv_heads * head_dim
    block = block_for(width)
    store_kv_kernel[(num_tokens, triton.cdiv(width, block))](
        key, value, cache[0], cache[1], slot_mapping, key.stride(0), value.stride(0), WIDTH=width, BLOCK=block,
        **dependent_launch(key.device),
    )  # fmt: skip


def block_for(width: int) -> int:
    """Elements per program for rows of ``width`` elements: a power of two."""
    return min(int(triton.next_power_of_2(width)), _MAX_BLOCK)
