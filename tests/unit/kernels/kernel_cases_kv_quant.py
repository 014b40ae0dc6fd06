"""Storing quantised K/V by a kernel: interpreted against its PyTorch twin (``CASES``), and the engine's launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from tests.paged_batches import among_layers
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, SCALE_DTYPE, KeyValue, LayerKv, store_kv
from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton


def check(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, merged: bool, device: str
) -> None:
    """Random distinct slots with padding among them; one head is zero; values equal the twin's except in ties."""
    generator = torch.Generator().manual_seed(num_kv_heads * head_dim)
    num_tokens, block_size = 7, 4
    row = torch.randn(num_tokens, 4 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    key, value = row[:, num_kv_heads : 2 * num_kv_heads], row[:, 3 * num_kv_heads :]
    key[2, 0] = 0.0
    if not merged:
        key, value = key.contiguous(), value.contiguous()
    slots = torch.randperm(20, generator=generator)[:num_tokens]
    slots[[1, 5]] = -1
    slots = slots.to(device)
    caches, scales = [], []
    for store in (store_kv, store_kv_triton):
        caches.append(
            among_layers(torch.zeros(2, 5, block_size, num_kv_heads, head_dim, dtype=cache_dtype, device=device))
        )
        scales.append(among_layers(torch.zeros(2, 5, num_kv_heads, block_size, dtype=SCALE_DTYPE, device=device)))
        store(KeyValue(key, value), LayerKv(caches[-1], scales[-1]), slots)
    assert scales[0].count_nonzero() > 0
    torch.testing.assert_close(scales[1], scales[0], rtol=1e-6, atol=0)
    expected, actual = (cache.float() for cache in caches)
    torch.testing.assert_close(actual, expected, rtol=1 / 8, atol=1 if cache_dtype == torch.int8 else 2**-9)
    num_different = int((expected != actual).sum())
    assert num_different <= expected.numel() / 100, f"{num_different} values differ by a step"


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    shapes = [
        (num_kv_heads, head_dim, torch.float16 if merged else torch.float32, cache_dtype, merged)
        for (num_kv_heads, head_dim), cache_dtype, merged in product([(1, 32), (3, 80)], LARGEST_VALUE, (False, True))
    ]
    shapes += [(2, 256, torch.bfloat16, cache_dtype, True) for cache_dtype in LARGEST_VALUE]
    return {
        f"{heads} of {head_dim}, {str(dtype)[6:]} as {str(cache_dtype)[6:]}": partial(
            check, heads, head_dim, dtype, cache_dtype, merged
        )
        for heads, head_dim, dtype, cache_dtype, merged in shapes
    }


CASES = make_cases()


def launch_all(capability: int) -> None:
    """K and V as slices of a merged row."""
    dtypes, heads = (torch.float32, torch.bfloat16, torch.float16), [(1, 128), (3, 80), (8, 128)]
    cache_dtypes = [dtype for dtype in LARGEST_VALUE if dtype == torch.int8 or capability >= 89]
    for (dtype, (num_kv_heads, head_dim)), cache_dtype in product(zip(dtypes, heads, strict=True), cache_dtypes):
        row = torch.empty(7, 4 * num_kv_heads, head_dim, dtype=dtype, device="meta")
        cache = torch.empty(2, 100, 16, num_kv_heads, head_dim, dtype=cache_dtype, device="meta")
        scales = torch.empty(2, 100, num_kv_heads, 16, dtype=SCALE_DTYPE, device="meta")
        slots = torch.empty(7, dtype=torch.int64, device="meta")
        new = KeyValue(row[:, 2 * num_kv_heads : 3 * num_kv_heads], row[:, 3 * num_kv_heads :])
        store_kv_triton(new, LayerKv(cache, scales), slots)
