"""The Triton backend against loops and against the torch backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.paged_batches import make_batch
from tests.unit.attention.test_mla import differing_alone
from tp_engine.attention import mla
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.kernels.attention import paged_candidates
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv

MIXED = [(1, 40), (1, 1), (1, 0), (5, 5), (7, 30), (40, 55)]
DECODES = [(1, 40), (1, 300), (1, 0)]
SINKS = torch.tensor([-3.0, 0.0, 2.0, 200.0])


@pytest.mark.parametrize(
    ("block_size", "head_dim", "rule", "requests"),
    [
        (8, 32, {}, MIXED),
        (16, 80, {"sliding_window": 20}, MIXED),
        (256, 64, {}, DECODES),
        (16, 64, {}, MIXED[3:]),
        (16, 32, {"softcap": 1.5, "sliding_window": 20}, MIXED),
        (16, 64, {"sinks": SINKS}, MIXED),
        (16, 32, {"sinks": SINKS, "softcap": 1.5}, DECODES),
    ],
    ids=["mixed", "window", "decodes", "chunks", "softcap", "sinks", "softcap and sinks"],
)
def test_steps(block_size: int, head_dim: int, rule: dict[str, Any], requests: list[tuple[int, int]]) -> None:
    """Oracle: loops over tokens and heads; the output of padding tokens is zero."""
    backend = TritonBackend()
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.1, **rule)
    batch = make_batch(requests, shape, block_size=block_size, padding_tokens=2)
    backend.prepare(batch.metadata)
    for new in (batch.new, None):  # the second time, keys and values are already stored
        out = backend.forward(batch.query, new, LayerKv(batch.kv_cache), batch.metadata, shape)
        torch.testing.assert_close(out, batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", LARGEST_VALUE, ids=str)
def test_quantised_cache(cache_dtype: torch.dtype) -> None:
    """Oracle: the torch backend, for new prompts; each backend stores its own keys and values."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
    batch = make_batch([(1, 1), (9, 9), (33, 33)], shape)
    _, num_blocks, block_size, num_kv_heads, _ = batch.kv_cache.shape
    outputs = []
    for backend in (TorchBackend(), TritonBackend()):
        cache = torch.zeros(batch.kv_cache.shape, dtype=cache_dtype)
        scales = torch.zeros(2, num_blocks, num_kv_heads, block_size)
        backend.prepare(batch.metadata)
        new = KeyValue(batch.key * 1e-3, batch.value)
        outputs.append(backend.forward(batch.query, new, LayerKv(cache, scales), batch.metadata, shape))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_latent_attention_has_the_same_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each request in a step of its own, on one multiprocessor, by whose number keys are split."""
    monkeypatch.setattr(paged_candidates, "_INTERPRETED_MULTIPROCESSORS", 1)
    monkeypatch.setattr(mla, "MIN_EXPANDED_QUERIES", 12)
    assert differing_alone(TritonMLABackend(), [(1, 17), (13, 13), (9, 21), (12, 17)]) == []
