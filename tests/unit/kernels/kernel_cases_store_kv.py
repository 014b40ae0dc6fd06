"""Storing K/V by a kernel: interpreted against its PyTorch twin (``CASES``), and the launches of real models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.paged_batches import among_layers
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, store_kv
from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, merged: bool, device: str
) -> None:
    """Random distinct slots with padding among them; merged: K and V are slices of one QKV row."""
    generator = torch.Generator().manual_seed(num_kv_heads * head_dim)
    num_tokens, width = 7, num_kv_heads * head_dim
    shape = (num_tokens, num_kv_heads, head_dim)
    if merged:
        row = torch.randn(num_tokens, 5 * width, generator=generator).to(device, dtype)
        key, value = (row[:, i * width : (i + 1) * width].view(shape) for i in (3, 4))
    else:
        key, value = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    slots = torch.randperm(20, generator=generator)[:num_tokens]
    slots[[1, 5]] = -1
    slots, size = slots.to(device), (2, 5, 4, num_kv_heads, head_dim)
    expected, actual = (among_layers(torch.zeros(size, dtype=cache_dtype, device=device)) for _ in range(2))
    store_kv(KeyValue(key, value), LayerKv(expected), slots)
    store_kv_triton(KeyValue(key, value), LayerKv(actual), slots)
    assert expected.count_nonzero() > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def check_rows(dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    """Latent attention's cache has one part, whose first elements are the values."""
    rows = torch.randn(7, 700).to(device, dtype)[:, 5:581].unsqueeze(1)
    slots = torch.tensor([3, -1, 19, 0, 7, -1, 8], device=device)
    caches = [torch.zeros(1, 5, 4, 1, 576, dtype=cache_dtype, device=device) for _ in range(2)]
    all_scales = [torch.zeros(1, 5, 1, 4, device=device) if cache_dtype == torch.int8 else None for _ in range(2)]
    for store, cache, scales in zip((store_kv, store_kv_triton), caches, all_scales, strict=True):
        store(KeyValue(rows, rows[..., :512]), LayerKv(cache, scales), slots)
    assert caches[0].count_nonzero() > 0
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=0)
    if all_scales[0] is not None:
        torch.testing.assert_close(all_scales[1], all_scales[0], rtol=0, atol=0)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    kinds = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.int8))
    cases: dict[str, Callable[[str], None]] = {
        f"rows, {str(dtype)[6:]} as {str(cache_dtype)[6:]}": partial(check_rows, dtype, cache_dtype)
        for dtype, cache_dtype in kinds
    }
    dtypes = [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.bfloat16)]
    heads = [(1, 32), (3, 80), (4, 64), (8, 128), (12, 128), (2, 256)]
    for (num_kv_heads, head_dim), (dtype, cache_dtype), merged in product(heads, dtypes, (False, True)):
        name = f"{num_kv_heads} of {head_dim}, {str(dtype)[6:]} as {str(cache_dtype)[6:]}{', merged' * merged}"
        cases[name] = partial(check, num_kv_heads, head_dim, dtype, cache_dtype, merged)
    return cases


CASES = make_cases()


def launch_all() -> None:
    """K and V as slices of a merged row, for every type and several widths."""
    for dtype, (num_kv_heads, head_dim) in product(DTYPES, [(1, 128), (3, 80), (8, 128)]):
        row = torch.empty(7, 4 * num_kv_heads, head_dim, dtype=dtype, device="meta")
        cache = torch.empty(2, 100, 16, num_kv_heads, head_dim, dtype=dtype, device="meta")
        slots = torch.empty(7, dtype=torch.int64, device="meta")
        new = KeyValue(row[:, 2 * num_kv_heads : 3 * num_kv_heads], row[:, 3 * num_kv_heads :])
        store_kv_triton(new, LayerKv(cache), slots)


def check_compiled(kernel: Any, capability: int) -> None:
    """Slots are addressed with 64 bits."""
    size = kernel.src.constants[(kernel.src.fn.arg_names.index("SIZE"),)]
    assert f"arith.constant {size} : i64" in kernel.asm["ttir"]
