"""Every attention backend against the torch backend; packages that are not installed have stand-ins.

The stand-ins have the packages' documented semantics, and assert what the packages require.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import fake_attention_packages as fakes
from tests.paged_batches import PagedBatch, make_batch
from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.attention.flash_attn import FlashAttnBackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

DECODES = [(1, 40), (1, 300), (1, 1), (1, 256), (1, 257)]
PREFILLS = [(5, 5), (7, 300), (1, 9), (40, 290)]
STEPS = [DECODES, PREFILLS[:3], DECODES + PREFILLS, [*DECODES, (1, 0), (1, 0)]]


MAKERS: dict[str, Callable[[], AttentionBackend]] = {
    "flash_attn 2": lambda: FlashAttnBackend(2, fakes),
    "flash_attn 3": lambda: FlashAttnBackend(3, fakes.version_3),
}


def run(backend: AttentionBackend, batch: PagedBatch, *, is_stored: bool = False) -> torch.Tensor:
    backend.prepare(batch.metadata)
    new = None if is_stored else batch.new
    return backend.forward(batch.query, new, LayerKv(batch.kv_cache), batch.metadata, batch.shape)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("padding_tokens", [0, 3])
@pytest.mark.parametrize("requests", STEPS, ids=["decodes", "prefills", "mixed", "padded"])
@pytest.mark.parametrize("name", MAKERS)
def test_equals_torch_backend(
    name: str, requests: list[tuple[int, int]], padding_tokens: int, window: int | None
) -> None:
    """Oracle: the torch backend, itself checked against loops; the caches end up equal too.

    Then once more with everything already stored.
    """
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, sliding_window=window)
    backend, outputs, caches = MAKERS[name](), [], []
    for one in (TorchBackend(), backend):
        batch = make_batch(requests, shape, block_size=256, padding_tokens=padding_tokens)
        outputs.append(run(one, batch))
        caches.append(batch.kv_cache)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(run(backend, batch, is_stored=True), outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("requests", STEPS[:3], ids=["decodes", "prefills", "mixed"])
def test_softcap(name: str, requests: list[tuple[int, int]]) -> None:
    """Oracle: the torch backend; scores are beyond the cap."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.9, softcap=1.5)
    batches = [make_batch(requests, shape, block_size=256) for _ in range(2)]
    found, expected = (run(one, batch) for one, batch in zip((MAKERS[name](), TorchBackend()), batches, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_of_any_size() -> None:
    """Oracle: loops; one backend serves layers with and without a window, step after step."""
    backend = MAKERS["flash_attn 3"]()
    for seed, window in enumerate((None, 20, None)):
        shape = AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16, scale=0.3, sliding_window=window)
        batch = make_batch([(1, 40), (1, 3), (5, 21)], shape, block_size=16, seed=seed)
        torch.testing.assert_close(run(backend, batch), batch.expected(), rtol=1e-5, atol=1e-5)
