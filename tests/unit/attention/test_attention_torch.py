"""The CPU attention backends against loops over tokens and heads (rows B3, B9, B10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paged_batches import make_batch
from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.tiles import TILE
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.cpu.library import native_library
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": TorchBackend, "native": NativeBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """A new backend of each kind that this machine supports."""
    if request.param == "native" and native_library() is None:
        pytest.skip("the native kernels cannot be built here")
    return BACKENDS[request.param]()


def shape_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    *,
    has_sinks: bool = False,
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        sinks=torch.linspace(-3, 4, num_heads) if has_sinks else None,
    )


MIXED = [(1, 40), (1, 3), (1, 1), (1, 120), (1, 0), (5, 5), (7, 30), (7, 64), (40, 40), (40, 55), (2, 17)]


@pytest.mark.parametrize("window", [None, 1, 9, 48])
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_mixed_batch(backend: AttentionBackend, block_size: int, window: int | None) -> None:
    """Oracle: loops.  Decodes, then chunks with and without cached context, a padding request, padding tokens."""
    batch = make_batch(MIXED, shape_of(4, 2, 32, window), block_size=block_size, padding_tokens=3)
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (None, True), (30.0, True)])
@pytest.mark.parametrize("requests", [MIXED, [(1, 40)], [(1, 700), (300, 310)], [(60, 60)]], ids=str)
def test_softcap_and_sinks(
    backend: AttentionBackend,
    requests: list[tuple[int, int]],
    softcap: float | None,
    has_sinks: bool,
    window: int | None,
) -> None:
    """Oracle: loops.  Scores beyond the cap, sinks above and below all scores, several ranges and tiles."""
    shape = shape_of(6, 2, 16, window, softcap, has_sinks=has_sinks)
    batch = make_batch(requests, shape, block_size=8, padding_tokens=3)
    batch.query *= 3
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 2), (4, 1), (8, 1)])
def test_head_shapes(backend: AttentionBackend, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Oracle: loops, for query groups of 1, 2, 4 and 8."""
    batch = make_batch([(1, 33), (1, 7), (3, 20), (3, 3), (34, 50)], shape_of(num_heads, num_kv_heads, head_dim))
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("request_lens", [(1, 1), (1, 50), (6, 6), (6, 50), (50, 50), (50, 90)])
def test_one_request(
    backend: AttentionBackend, request_lens: tuple[int, int], window: int | None, consecutive: bool
) -> None:
    """Oracle: loops.  Consecutive blocks are read in place."""
    batch = make_batch([request_lens], shape_of(4, 2, 16, window), consecutive_blocks=consecutive)
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("cached", [0, 70])
def test_query_of_several_tiles(backend: AttentionBackend, cached: int, window: int | None) -> None:
    """Oracle: loops."""
    length = 2 * TILE + 30
    batch = make_batch([(length, length + cached)], shape_of(2, 1, 8, window))
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(backend: AttentionBackend, dtype: torch.dtype, tolerance: float) -> None:
    """Oracle: loops in float32 over the same rounded inputs."""
    batch = make_batch(MIXED, shape_of(4, 2, 32), dtype=dtype)
    out = batch.attend(backend)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), batch.expected(), rtol=tolerance, atol=tolerance)


def test_cache_of_another_dtype(backend: AttentionBackend) -> None:
    """Oracle: loops in float32; fresh prompts read the rounded cache too, so chunking does not change results."""
    requests = [(1, 9), (1, 30), (40, 40), (5, 5)]
    batch = make_batch(requests, shape_of(2, 1, 16), cache_dtype=torch.bfloat16)
    batch.all_keys = [keys.bfloat16() for keys in batch.all_keys]
    batch.all_values = [values.bfloat16() for values in batch.all_values]
    torch.testing.assert_close(batch.attend(backend), batch.expected(), rtol=1e-5, atol=1e-5)


def test_layers_with_and_without_window_and_many_steps(backend: AttentionBackend) -> None:
    """Oracle: loops.  One prepare serves all layers; the next prepare discards the last step.

    The buffers of the first steps serve the last step too, which runs outside inference mode.
    """
    steps = [[(1, 40), (3, 30)], [(1, 12), (1, 70), (33, 40)], [(1, 200), (1, 5), (300, 310)], [(1, 9), (40, 90)]]
    for seed, requests in enumerate(steps):
        batch = make_batch(requests, shape_of(4, 2, 16), seed=seed)
        with torch.inference_mode(seed < 3):
            backend.prepare(batch.metadata)
            kv = LayerKv(batch.cache_for(backend))
            for window, has_sinks in ((None, False), (8, True), (None, True), (None, False)):
                batch.shape = shape_of(4, 2, 16, window, has_sinks=has_sinks)
                out = backend.forward(batch.query, batch.new, kv, batch.metadata, batch.shape)
                torch.testing.assert_close(out, batch.expected(), rtol=1e-5, atol=1e-5)


def test_inputs_may_be_slices_of_merged_projections(backend: AttentionBackend) -> None:
    """Oracle: the same inputs, contiguous."""
    batch = make_batch(MIXED, shape_of(4, 2, 16))
    expected = batch.attend(backend)
    merged = torch.cat([states.flatten(1) for states in (batch.query, batch.key, batch.value)], dim=1)
    batch.query, batch.key, batch.value = (
        part.view(len(part), -1, 16) for part in torch.split(merged, [64, 32, 32], dim=1)
    )
    torch.testing.assert_close(batch.attend(backend), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch(name: str, data: st.DataObject) -> None:
    """Oracle: loops, over random chunk boundaries, block sizes, windows, softcaps, sinks and shuffled blocks."""
    if name == "native" and native_library() is None:
        pytest.skip("the native kernels cannot be built here")
    decodes = data.draw(st.lists(st.integers(0, 90).map(lambda seq_len: (1, seq_len)), max_size=6))
    chunk = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))
    prefills = data.draw(st.lists(chunk, max_size=4))
    if not decodes + prefills:
        return
    group, kv_heads = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 1)]))
    window = data.draw(st.none() | st.integers(1, 70))
    softcap, has_sinks = data.draw(st.sampled_from([None, 0.5, 20.0])), data.draw(st.booleans())
    shape = shape_of(group * kv_heads, kv_heads, 8, window, softcap, has_sinks=has_sinks)
    block_size = data.draw(st.sampled_from([4, 8, 16]))
    batch = make_batch(decodes + prefills, shape, block_size=block_size, seed=data.draw(st.integers(0, 99)))
    torch.testing.assert_close(batch.attend(BACKENDS[name]()), batch.expected(), rtol=1e-5, atol=1e-5)
