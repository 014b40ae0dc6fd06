"""What we pass to the flash-attn package, with functions of its documented semantics in its place."""

from __future__ import annotations

import pytest
import torch

from tests import fake_flash_attn
from tests.paged_batches import make_batch
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.flash_attn import FlashAttnBackend
from tp_engine.attention.torch_backend import TorchBackend

DECODES = [(1, 40), (1, 300), (1, 1), (1, 256), (1, 257)]
PREFILLS = [(5, 5), (7, 300), (1, 9), (40, 290)]


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("padding_tokens", [0, 3])
@pytest.mark.parametrize("requests", [DECODES, PREFILLS[:3], DECODES + PREFILLS, [*DECODES, (1, 0), (1, 0)]], ids=str)
def test_equals_torch_backend(requests: list[tuple[int, int]], padding_tokens: int, window: int | None) -> None:
    """Oracle: the torch backend, itself checked against loops; the caches end up equal too."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, sliding_window=window)
    outputs, caches = [], []
    for backend in (TorchBackend(), FlashAttnBackend(fake_flash_attn)):
        batch = make_batch(requests, shape, block_size=256, padding_tokens=padding_tokens)
        backend.prepare(batch.metadata)
        outputs.append(
            backend.forward(batch.query, batch.key, batch.value, batch.kv_cache, batch.metadata, batch.shape)
        )
        caches.append(batch.kv_cache)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=0, equal_nan=True)
