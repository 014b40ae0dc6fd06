"""The KV cache tensor: shape, views, binding, lazily used pages, errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tp_engine.errors import MemoryBudgetError
from tp_engine.kv_layout import KvKind, lay_out
from tp_engine.worker.kv_cache import KvCacheShape, allocate_kv_cache, allocate_kv_scales, bind_kv_cache, resident_bytes

CPU = torch.device("cpu")


class Layer:
    """An attention layer that only remembers its cache."""

    kv_cache: torch.Tensor
    kv_scales: torch.Tensor | None

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
        self.kv_cache, self.kv_scales = kv_cache, kv_scales


THREE_ALIKE = lay_out([KvKind(window=None, num_kv_heads=2, head_dim=64)] * 3)


def small_shape(dtype: torch.dtype = torch.bfloat16) -> KvCacheShape:
    """Three layers."""
    return KvCacheShape(layers_per_block=3, block_size=16, local_num_kv_heads=2, head_dim=64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_zeros(dtype: torch.dtype) -> None:
    """Oracle: the documented shape; block_bytes is what the tensor takes per block."""
    cache = allocate_kv_cache(small_shape(dtype), 5, CPU)
    assert cache.shape == (2, 3, 5, 16, 2, 64)
    assert (cache.dtype, cache.device, cache.is_contiguous()) == (dtype, CPU, True)
    assert cache.numel() * cache.itemsize == 5 * small_shape(dtype).block_bytes
    assert not cache.any()


def test_layers_are_bound_by_index_to_views() -> None:
    """Oracle: layer i's writes appear at [:, i] and nowhere else."""
    cache, layers = allocate_kv_cache(small_shape(), 5, CPU), [Layer() for _ in range(3)]
    bind_kv_cache(cache, layers, THREE_ALIKE)
    for index, layer in enumerate(layers):
        assert layer.kv_cache.shape == (2, 5, 16, 2, 64)
        layer.kv_cache.fill_(index + 1)
    assert [int(cache[:, index].min()) for index in range(3)] == [1, 2, 3]
    assert [int(cache[:, index].max()) for index in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_layers_of_groups_are_bound_by_their_place(dtype: torch.dtype) -> None:
    """Oracle: the layout by hand: groups of layers 1, 5 (full), 0, 2 and 3, 4 (windows), so two layers to a block."""
    windows = (8, None, 8, 8, 8, None)
    layout = lay_out([KvKind(window=window, num_kv_heads=2, head_dim=64) for window in windows])
    shape = dataclasses.replace(small_shape(dtype), layers_per_block=layout.layers_per_block)
    cache, scales = allocate_kv_cache(shape, 5, CPU), allocate_kv_scales(shape, 5, CPU)
    layers = [Layer() for _ in windows]
    bind_kv_cache(cache, layers, layout, scales)
    assert cache.shape == (2, 2, 5, 16, 2, 64) and 5 * shape.block_bytes == cache.nbytes + (
        scales.nbytes if scales is not None else 0
    )
    for layer, place in zip(layers, (0, 0, 1, 0, 1, 1), strict=True):
        assert layer.kv_cache.data_ptr() == cache[:, place].data_ptr()
        assert layer.kv_cache.shape == (2, 5, 16, 2, 64)
        if scales is not None and layer.kv_scales is not None:
            assert layer.kv_scales.data_ptr() == scales[:, place].data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_cache_has_scales_that_are_counted(dtype: torch.dtype) -> None:
    """Oracle: the documented shapes; block_bytes is what both tensors take per block; zeros; layers get their views."""
    shape, layers = small_shape(dtype), [Layer() for _ in range(3)]
    cache, scales = allocate_kv_cache(shape, 5, CPU), allocate_kv_scales(shape, 5, CPU)
    assert scales is not None and (cache.dtype, scales.dtype) == (dtype, torch.float32)
    assert cache.shape == (2, 3, 5, 16, 2, 64) and scales.shape == (2, 3, 5, 2, 16)
    assert 5 * shape.block_bytes == cache.numel() + 4 * scales.numel() == 5 * 2 * 3 * 16 * 2 * (64 + 4)
    assert not cache.float().any() and not scales.any()
    bind_kv_cache(cache, layers, THREE_ALIKE, scales)
    for index, layer in enumerate(layers):
        assert layer.kv_scales is not None and layer.kv_scales.shape == (2, 5, 2, 16)
        layer.kv_scales.fill_(index + 1)
    assert [float(scales[:, index].mean()) for index in range(3)] == [1.0, 2.0, 3.0]


def test_other_caches_have_no_scales() -> None:
    """Oracle: None, also for the layers."""
    assert allocate_kv_scales(small_shape(), 5, CPU) is None
    layers = [Layer() for _ in range(3)]
    bind_kv_cache(allocate_kv_cache(small_shape(), 5, CPU), layers, THREE_ALIKE)
    assert [layer.kv_scales for layer in layers] == [None, None, None]


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_layers_is_our_fault(count: int) -> None:
    """Oracle: an assertion about the number of layers."""
    with pytest.raises(AssertionError, match=f"{count} attention layers for a cache of 3"):
        bind_kv_cache(allocate_kv_cache(small_shape(), 1, CPU), [Layer() for _ in range(count)], THREE_ALIKE)


def test_pages_are_taken_when_blocks_are_used() -> None:
    """Oracle: a cache of 1.5 GiB occupies nothing at first, then the page of each layer's first block."""
    cache = allocate_kv_cache(small_shape(), 65_536, CPU)
    assert resident_bytes(cache) == 0
    cache[:, :, 0] = 1.0
    assert 6 * 4096 <= resident_bytes(cache) <= 6 * (2 << 20)


def test_works_under_inference_mode() -> None:
    """Oracle: values written inside inference mode can be read outside."""
    cache = allocate_kv_cache(small_shape(), 2, CPU)
    with torch.inference_mode():
        cache[:, 0] = 3.0
    assert int(cache.sum()) == 2 * 2 * 16 * 2 * 64 * 3


@pytest.mark.parametrize("num_blocks", [10**12, 10**18])
def test_too_large_a_cache_is_a_budget_error(num_blocks: int) -> None:
    """Oracle: our error with the numbers and the remedy, not the allocator's own."""
    with pytest.raises(MemoryBudgetError, match=rf"for {num_blocks} KV blocks on cpu.*lower gpu_memory_utilization"):
        allocate_kv_cache(small_shape(), num_blocks, CPU)
