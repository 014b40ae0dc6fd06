"""Paged attention: the PyTorch twin, and the sizes of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.paged_batches import make_batch
from tests.unit.kernels.kernel_harness import needs_triton
from tp_engine.attention.base import AttentionShape
from tp_engine.errors import ConfigError
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, store_kv


@pytest.mark.parametrize("window", [None, 1, 20])
def test_twin(window: int | None) -> None:
    """Oracle: loops over tokens and heads."""
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.3, sliding_window=window)
    batch = make_batch([(1, 40), (1, 0), (5, 5), (7, 30), (30, 45)], shape, block_size=8)
    metadata = batch.metadata
    kv = LayerKv(batch.kv_cache)
    store_kv(batch.new, kv, metadata.slot_mapping)
    out = paged_attention(
        batch.query,
        kv,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start,
        scale=shape.scale,
        window=window,
    )
    torch.testing.assert_close(out, batch.expected(), rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    ("num_requests", "num_kv_heads", "usual", "most"),
    [(1, 8, 32, 64), (8, 8, 4, 32), (64, 8, 1, 4), (256, 8, 1, 1), (256, 1, 1, 8), (100_000, 1, 1, 1)],
)
def test_number_of_splits(num_requests: int, num_kv_heads: int, usual: int, most: int) -> None:
    """Oracle: powers of two: two programs per multiprocessor, and 16 at most; neither above 64."""
    from tp_engine.kernels.attention.paged_decode_triton import decode_sizes

    sizes = decode_sizes(num_requests, num_kv_heads, 128, 2, 132)
    assert (sizes.usual_splits, sizes.num_splits) == (usual, most)


@needs_triton
def test_fixed_splits_do_not_depend_on_the_batch() -> None:
    """Oracle: those of one request on the smallest GPU."""
    from tp_engine.kernels.attention.paged_decode_triton import decode_sizes

    expected = decode_sizes(1, 1, 128, 2, 1, is_fixed=True)
    assert all(decode_sizes(*batch, 128, 2, 132, is_fixed=True) == expected for batch in ((1, 8), (64, 1), (1000, 8)))


@needs_triton
def test_a_step_too_large_for_a_launch_is_refused() -> None:
    """Oracle: by hand: 64 heads of one KV head leave 2 queries per program of 128 rows, so 65,535 programs hold 131,069
    tokens of one request."""
    from tp_engine.kernels.attention.paged_prefill_triton import paged_prefill_triton, prefill_sizes

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, cache = empty(2, 64, 128, dtype=torch.bfloat16), empty(2, 9, 16, 1, 128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"131,070 prompt tokens needs 65,536 programs.*lower max_num_batched_tokens"):
        paged_prefill_triton(
            query, LayerKv(cache), empty(1, 9), empty(1), empty(2), query,
            scale=1.0, sizes=prefill_sizes(128, 2), num_queries=131_070,
        )  # fmt: skip
