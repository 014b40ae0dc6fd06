"""Every attention backend on a GPU against loops in float32."""

from __future__ import annotations

import pytest
import torch

from tests.paged_batches import PagedBatch, make_batch
from tp_engine.attention.base import AttentionBackend, AttentionNeeds, AttentionShape
from tp_engine.attention.registry import check_backend, select_backend
from tp_engine.errors import ConfigError
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv, store_kv
from tp_engine.kernels.ops import has_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REQUESTS = [(1, 40), (1, 300), (1, 1), (1, 0), (5, 5), (7, 30), (7, 300), (300, 300), (40, 290)]


def usable_backend(name: str, dtype: torch.dtype, cache: torch.Tensor) -> AttentionBackend:
    """The backend; skips the test if it cannot be used here."""
    needs = AttentionNeeds(
        device_type="cuda",
        dtype=dtype,
        kv_cache_dtype=cache.dtype,
        block_size=cache.shape[2],
        head_dims=(cache.shape[4],),
        capability=torch.cuda.get_device_capability(),
    )
    try:
        check_backend(name, needs)
    except ConfigError as error:
        pytest.skip(str(error))
    return select_backend(name, needs)


def run(name: str, batch: PagedBatch) -> torch.Tensor:
    """Output (N, heads, head_dim); skips the test if the backend cannot be used here."""
    backend = usable_backend(name, batch.query.dtype, batch.kv_cache)
    backend.prepare(batch.metadata)
    return backend.forward(batch.query, batch.new, LayerKv(batch.kv_cache), batch.metadata, batch.shape)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["torch", "triton", "flash_attn"])
def test_backend(name: str, block_size: int, dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Oracle: loops in float32; the error is at most twice that of the torch backend in the same precision."""
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, sliding_window=window)
    outputs = {}
    for backend in ("torch", name):
        batch = make_batch(REQUESTS, shape, block_size=block_size, dtype=dtype, device="cuda", padding_tokens=2)
        outputs[backend] = run(backend, batch).float().cpu()
    expected = batch.expected()
    plain_error = (outputs["torch"] - expected).abs().max().item()
    assert plain_error < (1e-4 if dtype == torch.float32 else 3e-2)
    assert (outputs[name] - expected).abs().max().item() <= 2 * plain_error + 1e-6


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("cache_dtype", LARGEST_VALUE, ids=str)
def test_quantised_cache(cache_dtype: torch.dtype) -> None:
    """Oracle: the torch backend, which also stores and attends; a value between two steps may round to either."""
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
    outputs = []
    for name in ("torch", "triton"):
        batch = make_batch([(1, 1), (9, 9), (300, 300)], shape, dtype=torch.bfloat16, device="cuda")
        cache = torch.zeros(batch.kv_cache.shape, dtype=cache_dtype, device="cuda")
        scales = torch.zeros(2, cache.shape[1], 2, 16, device="cuda")
        backend = usable_backend(name, batch.query.dtype, cache)
        backend.prepare(batch.metadata)
        out = backend.forward(batch.query, batch.new, LayerKv(cache, scales), batch.metadata, shape)
        outputs.append(out.float())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_decodes_in_a_cuda_graph(name: str) -> None:
    """Oracle: the same backend without a graph; replays have other lengths and other blocks."""
    shape = AttentionShape(num_heads=16, num_kv_heads=2, head_dim=128, scale=0.1)
    steps = [[(1, 40), (1, 300), (1, 1), (1, 0)], [(1, 1), (1, 17), (1, 900), (1, 2)], [(1, 0)] * 3 + [(1, 1024)]]
    batch, *batches = (
        make_batch(step, shape, dtype=torch.bfloat16, block_size=256, device="cuda") for step in (steps[0], *steps)
    )
    num_blocks = max(one.kv_cache.shape[1] for one in batches)
    cache = torch.zeros(2, num_blocks, *batch.kv_cache.shape[2:], dtype=torch.bfloat16, device="cuda")
    metadata = batch.metadata
    metadata.block_table = torch.zeros(4, 4, dtype=torch.int32, device="cuda")
    backend = usable_backend(name, torch.bfloat16, cache)
    if not backend.can_capture_decodes:
        pytest.skip(f"{name} cannot be captured")

    def step() -> torch.Tensor:
        return backend.forward(batch.query, batch.new, LayerKv(cache), metadata, shape)

    backend.prepare(metadata)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in reversed(batches):
        cache[:, : other.kv_cache.shape[1]] = other.kv_cache
        metadata.block_table[:, : other.metadata.block_table.shape[1]] = other.metadata.block_table
        for kept, new in (
            (metadata.seq_lens, other.metadata.seq_lens),
            (metadata.slot_mapping, other.metadata.slot_mapping),
            (batch.query, other.query),
            (batch.key, other.key),
            (batch.value, other.value),
        ):
            kept.copy_(new)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, step())
        torch.testing.assert_close(replayed.float().cpu(), other.expected(), rtol=0, atol=3e-2)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_store_kernel_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """Oracle: the PyTorch twin; the graph is replayed with other slots."""
    from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

    new = KeyValue(*torch.randn(2, 6, 3, 80, device="cuda").to(dtype))
    slots = torch.full((6,), -1, device="cuda")
    actual = torch.zeros(2, 4, 16, 3, 80, dtype=dtype, device="cuda")
    expected = actual.clone()
    store_kv_triton(new, LayerKv(actual), slots)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv_triton(new, LayerKv(actual), slots)
    for replay in ([3, -1, 60, 17, -1, 0], [5, 6, 7, -1, 9, 63]):
        slots.copy_(torch.tensor(replay))
        graph.replay()
        store_kv(new, LayerKv(expected), slots)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_store_kernel_beyond_32_bits() -> None:
    """Oracle: the PyTorch twin, at a slot whose element offset does not fit in 32 bits."""
    from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

    num_blocks = 2**31 // (16 * 8 * 128) + 2
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_blocks * 16 * 8 * 128:
        pytest.skip("too little free memory")
    cache = torch.zeros(2, num_blocks, 16, 8, 128, dtype=torch.uint8, device="cuda")
    key, value = torch.randint(1, 200, (2, 1, 8, 128), dtype=torch.uint8, device="cuda")
    slot = num_blocks * 16 - 1
    store_kv_triton(KeyValue(key, value), LayerKv(cache), torch.tensor([slot], device="cuda"))
    torch.testing.assert_close(cache[0].view(-1, 8, 128)[slot], key[0], rtol=0, atol=0)
    torch.testing.assert_close(cache[1].view(-1, 8, 128)[slot], value[0], rtol=0, atol=0)
