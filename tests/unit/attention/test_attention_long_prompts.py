"""Long prompts that begin in a step: which requests they are, and that the parts of a step make up the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.paged_batches import PagedBatch, make_batch
from tp_engine import LLM, SamplingParams
from tp_engine.attention.base import AttentionNeeds, AttentionShape
from tp_engine.attention.fresh import attend_causally
from tp_engine.attention.long_prompts import (
    LongPromptsBackend,
    first_lengths,
    padded_length,
    why_not,
)
from tp_engine.attention.registry import check_backend, select_backend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.errors import ConfigError
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, store_kv

PLAIN: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
NEEDS: dict[str, Any] = {
    "device_type": "cuda",
    "dtype": torch.bfloat16,
    "kv_cache_dtype": torch.bfloat16,
    "block_size": 16,
    "head_dims": (128,),
}
SIZES: dict[str, Any] = {
    "max_model_len": 192,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 6,
}
# (queries, all tokens); prompts of 30 tokens or more that begin in the step are long.
STEPS = {
    "first, middle and last": [(1, 40), (1, 1), (33, 33), (9, 50), (40, 40), (64, 64), (29, 29), (31, 31)],
    "none beside them": [(30, 30), (47, 47)],
    "behind all else": [(1, 7), (30, 31), (77, 77)],
    "before all else": [(50, 50), (8, 8)],
    "none": [(1, 40), (29, 29), (30, 60)],
    "decodes": [(1, 40), (1, 1)],
}


class Watched:
    """``attend_causally``, which notes how many queries and keys each call has."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, query: torch.Tensor, new: KeyValue, scale: float) -> torch.Tensor:
        assert len(query) == len(new.key) == len(new.value)
        self.calls.append(len(query))
        return attend_causally(query, new, scale)


def unpadded(requests: list[tuple[int, int]], shape: AttentionShape, **options: Any) -> PagedBatch:
    """A step as the engine makes those with prompts; memory that no request owns is NaN."""
    batch = make_batch(requests, shape, **options)
    batch.metadata.is_padded = False
    return batch


def attended(batch: PagedBatch, *, stored: bool) -> tuple[torch.Tensor, list[int]]:
    """The output, and the lengths given to ``attend``; ``stored``: keys and values are in the cache before."""
    watched = Watched()
    backend = LongPromptsBackend(TorchBackend, watched, least_tokens=30)
    kv = LayerKv(batch.cache_for(backend))
    if stored:
        store_kv(batch.new, kv, batch.metadata.slot_mapping)
    backend.prepare(batch.metadata)
    out = backend.forward(batch.query, None if stored else batch.new, kv, batch.metadata, batch.shape)
    return out, watched.calls


@pytest.mark.parametrize("stored", [False, True], ids=["given", "stored"])
@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_parts_make_up_the_step(requests: list[tuple[int, int]], stored: bool) -> None:
    """Oracle: loops in float32; and by hand, which requests are long and how far they are padded."""
    batch = unpadded(requests, AttentionShape(**PLAIN))
    out, calls = attended(batch, stored=stored)
    torch.testing.assert_close(out, batch.expected(), rtol=0, atol=2e-5)
    padded = {30: 32, 31: 32, 33: 40, 40: 40, 47: 48, 50: 56, 64: 64, 77: 80}
    assert calls == [padded[length] for length, total in requests if length == total >= 30]


@pytest.mark.parametrize(
    ("facts", "num_long"),
    [
        ({"sliding_window": 40}, 2),
        ({"sliding_window": 39}, 0),
        ({"softcap": 2.0}, 0),
        ({"sinks": torch.linspace(-1, 1, 6)}, 0),
    ],
    ids=["window", "shorter window", "softcap", "sinks"],
)
def test_layers_that_it_takes(facts: dict[str, Any], num_long: int) -> None:
    """Oracle: loops in float32; all requests of layers with other rules go to the other backend."""
    batch = unpadded([(1, 70), (40, 40), (5, 60), (32, 32)], AttentionShape(**PLAIN, **facts))
    out, calls = attended(batch, stored=False)
    torch.testing.assert_close(out, batch.expected(), rtol=0, atol=2e-5)
    assert len(calls) == num_long


def test_layers_of_both_kinds_share_a_step() -> None:
    """Oracle: loops in float32, for each of two layers that read the same prepared step."""
    shapes = [AttentionShape(**PLAIN), AttentionShape(**PLAIN, sliding_window=20), AttentionShape(**PLAIN)]
    batches = [unpadded(STEPS["first, middle and last"], shape) for shape in shapes]
    backend = LongPromptsBackend(TorchBackend, attend_causally, least_tokens=30)
    backend.prepare(batches[0].metadata)
    for batch in batches:
        kv = LayerKv(batch.cache_for(backend))
        out = backend.forward(batch.query, batch.new, kv, batches[0].metadata, batch.shape)
        torch.testing.assert_close(out, batch.expected(), rtol=0, atol=2e-5)


def test_padded_steps_have_none() -> None:
    """Oracle: by hand: in a recorded step the host does not know where prompts end."""
    batch = make_batch([(33, 33), (40, 40)], AttentionShape(**PLAIN), padding_tokens=3)
    out, calls = attended(batch, stored=False)
    torch.testing.assert_close(out, batch.expected(), rtol=0, atol=2e-5)
    assert calls == []


def test_quantised_cache() -> None:
    """Oracle: the other backend reads the same codes: what is read is what is stored."""
    batch = unpadded([(40, 40), (3, 50)], AttentionShape(**PLAIN))
    found = []
    for backend in (TorchBackend(), LongPromptsBackend(TorchBackend, attend_causally, least_tokens=30)):
        cache = torch.zeros(batch.kv_cache.shape, dtype=torch.int8)
        kv = LayerKv(cache, torch.zeros(2, cache.shape[1], 2, 16))
        backend.prepare(batch.metadata)
        found.append(backend.forward(batch.query, batch.new, kv, batch.metadata, batch.shape))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


def test_padded_lengths() -> None:
    """Oracle: their definition; at most a quarter longer, and four from each power of two to the next."""
    for length in range(4, 5000):
        padded = padded_length(length)
        assert length <= padded <= length * 1.25 and padded_length(padded) == padded
    assert len({padded_length(length) for length in range(1025, 16385)}) == 4 * 4


def test_first_steps_make_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; the steps that a start runs have a prompt of every padded length up to the limit."""
    assert first_lengths(8192) == []
    monkeypatch.setenv("TP_ENGINE_LONG_PROMPTS", "cudnn")
    assert first_lengths(1023) == [] and first_lengths(1024) == [1024]
    assert first_lengths(3000) == [1024, 1280, 1536, 1792, 2048, 2560, 3000]
    assert {padded_length(length) for length in first_lengths(8000)} == {
        padded_length(length) for length in range(1024, 8001)
    }


def test_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; a wrong value, and a place where it can not run, are refused by name."""
    monkeypatch.setenv("TP_ENGINE_LONG_PROMPTS", "cudnn")
    with patch("tp_engine.attention.registry.triton_backend.why_not", lambda needs: None):
        assert check_backend("auto", AttentionNeeds(**NEEDS)) == "triton"
    backend = select_backend("torch", AttentionNeeds(**NEEDS))
    assert isinstance(backend, LongPromptsBackend) and backend.name == "torch"
    with pytest.raises(ConfigError, match="TP_ENGINE_LONG_PROMPTS is cudnn: it needs a CUDA device, not cpu; unset it"):
        check_backend("torch", AttentionNeeds(**NEEDS | {"device_type": "cpu"}))
    monkeypatch.setenv("TP_ENGINE_LONG_PROMPTS", "flash")
    with pytest.raises(ConfigError, match="TP_ENGINE_LONG_PROMPTS is 'flash'; set it to backend or cudnn"):
        check_backend("torch", AttentionNeeds(**NEEDS))
    monkeypatch.delenv("TP_ENGINE_LONG_PROMPTS")
    assert isinstance(select_backend("torch", AttentionNeeds(**NEEDS)), TorchBackend)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"has_latents": True}, "latent attention"),
        ({"is_invariant": True}, "how much of it is cached"),
        ({"head_dims": (64, 256)}, "head_dim is 256"),
        ({"head_dims": (100,)}, "head_dim is 100"),
        ({"capability": (7, 5)}, "8.0"),
    ],
)
def test_rules(facts: dict[str, Any], message: str | None) -> None:
    """Oracle: by hand, from what PyTorch's cuDNN attention takes."""
    obstacle = why_not(AttentionNeeds(**NEEDS | facts))
    assert obstacle is None if message is None else obstacle is not None and message in obstacle


def test_engine(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same engine without it; chunks, cached prefixes and decodes run beside long prompts."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 100, 48).tolist()
    tails = [rng.integers(3, 100, size).tolist() for size in (1, 70, 20, 3)]
    prompts = [*(shared + tail for tail in tails), *(rng.integers(3, 100, size).tolist() for size in (90, 31, 64, 5))]
    folder, watched, found = checkpoint("qwen3", vocab_size=101, max_position=256), Watched(), []
    for backend in (TorchBackend, lambda: LongPromptsBackend(TorchBackend, watched, least_tokens=30)):
        with (
            patch("tp_engine.worker.worker.select_backend", lambda *_, make=backend: make()),
            LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **SIZES) as llm,
        ):
            params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
            for _ in range(2):  # the second time prefixes are cached
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
            llm.engine.check_integrity()
    assert found[2:] == found[:2]
    assert len(set(watched.calls)) > 2 and max(watched.calls) >= 64
