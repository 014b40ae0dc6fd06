"""The KV cache tensor: shape, views, binding, lazily used pages, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.errors import MemoryBudgetError
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, states_at, store_kv
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape, resident_bytes

CPU = torch.device("cpu")


class Layer:
    """An attention layer that only remembers its cache."""

    kv_cache: torch.Tensor
    kv_scales: torch.Tensor | None

    def bind_kv_cache(self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
        self.kv_cache, self.kv_scales = kv_cache, kv_scales

    index: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def bind_index_keys(self, keys: torch.Tensor, scales: torch.Tensor | None) -> None:
        self.index = keys, scales


def new_layer() -> Any:
    """Make what stands in for an ``Attention``."""
    return Layer()


THREE_ALIKE = lay_out([KvKind(window=None, num_kv_heads=2, head_dim=64)] * 3)


def small_shape(dtype: torch.dtype = torch.bfloat16) -> KvCacheShape:
    """Three layers."""
    return KvCacheShape(layout=THREE_ALIKE, block_size=16, dtype=dtype)


def small_blocks(dtype: torch.dtype = torch.bfloat16, count: int = 5) -> KvBlocks:
    """Blocks of three layers."""
    return KvBlocks.allocate(small_shape(dtype), count, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_zeros(dtype: torch.dtype) -> None:
    """Oracle: the documented shapes; block_bytes is what the tensor takes per block."""
    blocks = small_blocks(dtype)
    cache, scales = blocks.views[0]
    assert cache.shape == (5, 3, 2, 16, 2, 64) and scales is None
    assert (cache.dtype, cache.device, cache.is_contiguous()) == (dtype, CPU, True)
    assert cache.nbytes == blocks.raw.nbytes == 5 * small_shape(dtype).block_bytes
    assert not blocks.raw.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_block_is_one_piece(dtype: torch.dtype) -> None:
    """Oracle: a block of all layers, filled through the views, is one row of ``raw``, and no other row changes."""
    blocks = small_blocks(dtype)
    blocks.views[0].cache[3] = blocks.views[0].cache.new_ones((), dtype=torch.float32).to(dtype)
    if blocks.views[0].scales is not None:
        blocks.views[0].scales[3] = 1.0
    assert not blocks.raw[[0, 1, 2, 4]].any() and blocks.raw.is_contiguous()
    expected = [torch.ones(3 * 2 * 16 * 2 * 64).to(dtype).view(torch.uint8)]
    if blocks.views[0].scales is not None:
        expected.append(torch.ones(3 * 2 * 2 * 16).view(torch.uint8))
    assert torch.equal(blocks.raw[3], torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_strides_do_not_depend_on_the_number_of_blocks(dtype: torch.dtype) -> None:
    """Oracle: those of five blocks: strides are constants of compiled kernels, which are compiled with one block."""
    one, five = small_blocks(dtype, 1), small_blocks(dtype)
    (cache, scales), (caches, all_scales) = one.views[0], five.views[0]
    assert cache.stride() == caches.stride()
    if scales is not None and all_scales is not None:
        assert scales.stride() == all_scales.stride() and scales.stride(0) * 4 == one.raw.stride(0)


def test_layers_are_bound_by_index_to_views() -> None:
    """Oracle: layer i's writes appear at [:, i] and nowhere else."""
    blocks, layers = small_blocks(), [new_layer() for _ in range(3)]
    blocks.bind(layers)
    for index, layer in enumerate(layers):
        assert layer.kv_cache.shape == (2, 5, 16, 2, 64) and layer.kv_scales is None
        layer.kv_cache.fill_(index + 1)
    assert [int(blocks.views[0].cache[:, index].min()) for index in range(3)] == [1, 2, 3]
    assert [int(blocks.views[0].cache[:, index].max()) for index in range(3)] == [1, 2, 3]
    layers[1].kv_cache[1, 4] = 7.0
    cache = blocks.views[0].cache
    assert bool((cache[4, 1, 1] == 7.0).all()) and int((cache == 7.0).sum()) == 16 * 2 * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_layers_of_groups_are_bound_by_their_place(dtype: torch.dtype) -> None:
    """Oracle: the layout by hand: groups of layers 1, 5 (full), 0, 2 and 3, 4 (windows), so two layers to a block."""
    windows = (8, None, 8, 8, 8, None)
    layout = lay_out([KvKind(window=window, num_kv_heads=2, head_dim=64) for window in windows])
    shape = dataclasses.replace(small_shape(dtype), layout=layout)
    blocks, layers = KvBlocks.allocate(shape, 5, CPU), [new_layer() for _ in windows]
    blocks.bind(layers)
    cache, scales = blocks.views[0]
    assert cache.shape == (5, 2, 2, 16, 2, 64) and 5 * shape.block_bytes == cache.nbytes + (
        scales.nbytes if scales is not None else 0
    )
    for layer, place in zip(layers, (0, 0, 1, 0, 1, 1), strict=True):
        assert layer.kv_cache.data_ptr() == cache[:, place].data_ptr()
        assert layer.kv_cache.shape == (2, 5, 16, 2, 64)
        if scales is not None and layer.kv_scales is not None:
            assert layer.kv_scales.data_ptr() == scales[:, place].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_index_keys_have_a_region_of_their_own(dtype: torch.dtype) -> None:
    """Oracle: what each layer has stored last: latents of 24 numbers and index keys of 16 of two of three layers, at
    all slots of 3 blocks, come back as they are (of 8 bits nearly)."""
    latents = KvKind(window=None, num_kv_heads=1, head_dim=24, num_parts=1)
    layout = lay_out([dataclasses.replace(latents, index_dim=16), latents, dataclasses.replace(latents, index_dim=16)])
    blocks = KvBlocks.allocate(KvCacheShape(layout=layout, block_size=4, dtype=dtype), 3, CPU)
    layers = [new_layer() for _ in range(3)]
    blocks.bind(layers)
    assert [layer.index is not None for layer in layers] == [True, False, True]
    caches = [LayerKv(layer.kv_cache, layer.kv_scales) for layer in layers]
    caches += [LayerKv(*layer.index) for layer in layers if layer.index is not None]
    slots, stored = torch.arange(12), []
    for kv in caches:
        stored.append(torch.randn(12, 1, kv.cache.shape[-1]).bfloat16().float())
        store_kv(KeyValue(stored[-1], stored[-1]), kv, slots)
    for kv, expected in zip(caches, stored, strict=True):
        tolerance = 0.0 if dtype == torch.bfloat16 else 0.02 * float(expected.abs().max())
        torch.testing.assert_close(states_at(kv, 0, slots).float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_of_several_shapes_share_a_pool(world_size: int, dtype: torch.dtype) -> None:
    """Oracle: by hand.  Three windowed layers of 4 heads of 16, three full ones of 1 head of 32: on 1 rank a block has
    one of the former or three of the latter, on 2 ranks three of both; on 4 ranks a full layer is the larger one.  No
    layer reaches into another block."""
    wide = KvKind(window=None, num_kv_heads=1, head_dim=32)
    kinds = [KvKind(window=8, num_kv_heads=4, head_dim=16), wide] * 3
    layout = lay_out(kinds, world_size)
    sizes = {1: (3, 1, 1, 1), 2: (3, 3), 4: (1, 1, 1, 3)}[world_size]
    assert [len(group.layers) for group in layout.groups] == list(sizes)
    shape = KvCacheShape(layout=layout, block_size=4, dtype=dtype)
    local = (max(1, 4 // world_size), 16)
    scales = 4 if dtype == torch.int8 else 0
    per_token = [(dtype.itemsize * size + scales) * heads for heads, size in (local, (1, 32))]
    bytes_of = [2 * 4 * len(group.layers) * per_token[0 if group.window else 1] for group in layout.groups]
    assert shape.block_bytes == max(bytes_of)
    blocks, layers = KvBlocks.allocate(shape, 3, CPU), [new_layer() for _ in kinds]
    blocks.bind(layers)
    for index, layer in enumerate(layers):
        heads, size = (1, 32) if index % 2 else local
        assert layer.kv_cache.shape == (2, 3, 4, heads, size)
        layer.kv_cache[:, 1] = torch.ones((), dtype=torch.float32).to(dtype)
        if layer.kv_scales is not None:
            layer.kv_scales[:, 1] = 1.0
    assert not blocks.raw[[0, 2]].any() and blocks.raw[1].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_cache_has_scales_that_are_counted(dtype: torch.dtype) -> None:
    """Oracle: the documented shapes; block_bytes is what both tensors take per block; zeros; layers get their views."""
    blocks, layers = small_blocks(dtype), [new_layer() for _ in range(3)]
    scales = blocks.views[0].scales
    assert scales is not None and (blocks.views[0].cache.dtype, scales.dtype) == (dtype, torch.float32)
    assert blocks.views[0].cache.shape == (5, 3, 2, 16, 2, 64) and scales.shape == (5, 3, 2, 2, 16)
    assert 5 * small_shape(dtype).block_bytes == blocks.raw.nbytes == 5 * 2 * 3 * 16 * 2 * (64 + 4)
    assert not blocks.raw.any()
    blocks.bind(layers)
    for index, layer in enumerate(layers):
        assert layer.kv_scales is not None and layer.kv_scales.shape == (2, 5, 2, 16)
        layer.kv_scales.fill_(index + 1)
    assert [float(scales[:, index].mean()) for index in range(3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies_read_every_source_first(dtype: torch.dtype) -> None:
    """Oracle: the blocks before; a cycle of copies, and a block that is read twice."""
    blocks = small_blocks(dtype)
    before = blocks.raw.copy_(torch.randint(0, 256, blocks.raw.shape, dtype=torch.uint8)).clone()
    blocks.copy(np.array([[0, 1], [1, 0], [1, 4]], dtype=np.int32))
    assert torch.equal(blocks.raw, before[[1, 0, 2, 3, 1]])


def test_copies_need_no_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the blocks before; chains are copied from their ends, and only an exchange reads sources all at once."""
    blocks, order = small_blocks(torch.bfloat16, count=9), list[int]()
    before = blocks.raw.copy_(torch.randint(0, 256, blocks.raw.shape, dtype=torch.uint8)).clone()
    copied = torch._foreach_copy_

    def copy_and_note(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        order.append(len(to))
        copied(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_note)
    monkeypatch.setattr(torch.Tensor, "__setitem__", lambda *_: pytest.fail("a copy of all sources"))
    blocks.copy(np.array([[0, 1], [1, 2], [2, 3], [0, 4], [7, 8]], dtype=np.int32))
    assert torch.equal(blocks.raw, before[[0, 0, 1, 2, 0, 5, 6, 7, 7]]) and order == [3, 1, 1]


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_layers_is_our_fault(count: int) -> None:
    """Oracle: an assertion about the number of layers."""
    with pytest.raises(AssertionError, match=f"{count} attention layers for a cache of 3"):
        small_blocks().bind([new_layer() for _ in range(count)])


def test_pages_are_taken_when_blocks_are_used() -> None:
    """Oracle: a cache of 1.5 GiB occupies nothing at first, then the pages of the first block."""
    blocks = small_blocks(count=65_536)
    assert resident_bytes(blocks.raw) == 0
    blocks.views[0].cache[0] = 1.0
    assert 6 * 4096 <= resident_bytes(blocks.raw) <= 2 << 20


def test_works_under_inference_mode() -> None:
    """Oracle: values written inside inference mode can be read outside."""
    blocks = small_blocks(count=2)
    with torch.inference_mode():
        blocks.views[0].cache[:, 0] = 3.0
    assert int(blocks.views[0].cache.sum()) == 2 * 2 * 16 * 2 * 64 * 3


@pytest.mark.parametrize("num_blocks", [10**12, 10**18])
def test_too_large_a_cache_is_a_budget_error(num_blocks: int) -> None:
    """Oracle: our error with the numbers and the remedy, not the allocator's own."""
    with pytest.raises(MemoryBudgetError, match=rf"for {num_blocks} KV blocks on cpu.*lower gpu_memory_utilization"):
        KvBlocks.allocate(small_shape(), num_blocks, CPU)
