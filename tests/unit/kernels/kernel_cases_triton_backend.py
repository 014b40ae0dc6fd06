"""The Triton backend against loops and against the torch backend; needs its own process and TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import torch

from tests.paged_batches import make_batch
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv

MIXED = [(1, 40), (1, 1), (1, 0), (5, 5), (7, 30), (40, 55)]
DECODES = [(1, 40), (1, 300), (1, 0)]


def check_against_loops() -> None:
    """Mixed steps, decodes alone and chunks alone, with windows, caps and sinks; the output of padding tokens is
    zero."""
    backend = TritonBackend()
    sinks = torch.tensor([-3.0, 0.0, 2.0, 200.0])
    rules: tuple[tuple[int, int, dict[str, Any], list[tuple[int, int]]], ...] = (
        (8, 32, {}, MIXED),
        (16, 80, {"sliding_window": 20}, MIXED),
        (256, 64, {}, DECODES),
        (16, 64, {}, MIXED[3:]),
        (16, 32, {"softcap": 1.5, "sliding_window": 20}, MIXED),
        (16, 64, {"sinks": sinks}, MIXED),
        (16, 32, {"sinks": sinks, "softcap": 1.5}, DECODES),
    )
    for block_size, head_dim, rule, requests in rules:
        shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.1, **rule)
        batch = make_batch(requests, shape, block_size=block_size, padding_tokens=2)
        backend.prepare(batch.metadata)
        for new in (batch.new, None):  # the second time, keys and values are already stored
            out = backend.forward(batch.query, new, LayerKv(batch.kv_cache), batch.metadata, shape)
            torch.testing.assert_close(out, batch.expected(), rtol=1e-5, atol=1e-5)


def check_quantised(cache_dtype: torch.dtype) -> None:
    """New prompts; each backend stores its own keys and values."""
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


def main() -> None:
    check_against_loops()
    for cache_dtype in LARGEST_VALUE:
        check_quantised(cache_dtype)
    print(AGREEMENT)


if __name__ == "__main__":
    main()
