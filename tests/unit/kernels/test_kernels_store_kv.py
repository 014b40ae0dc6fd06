"""Storing keys and values by slot (row B9): the PyTorch twin."""

from __future__ import annotations

import pytest
import torch

from tests.paged_batches import among_layers
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, store_kv


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_twin_stores_by_slot_and_skips_padding(cache_dtype: torch.dtype) -> None:
    """Oracle: an assignment per token."""
    key, value = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = [9, -1, 0, 4, -1]
    cache = among_layers(torch.zeros(2, 3, 4, 2, 8, dtype=cache_dtype))
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // 4, slot % 4] = key[token]
            expected[1, slot // 4, slot % 4] = value[token]
    store_kv(KeyValue(key, value), LayerKv(cache), torch.tensor(slots))
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_twin_with_padding_only() -> None:
    """Oracle: no slot changes."""
    cache = torch.zeros(2, 3, 4, 1, 8)
    store_kv(KeyValue(*torch.randn(2, 2, 1, 8)), LayerKv(cache), torch.tensor([-1, -1]))
    assert cache.count_nonzero() == 0
