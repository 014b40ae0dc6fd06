"""Paged attention kernels: against their PyTorch twin, interpreted and on CUDA (``CASES``), and the launches of real
models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from tests.paged_batches import PagedBatch, among_layers, make_batch
from tests.unit.kernels.kernel_harness import SHARED_MEMORY
from tp_engine.attention.base import AttentionShape
from tp_engine.kernels.attention.paged_decode_triton import (
    MAX_ARRIVALS,
    decode_sizes,
    paged_decode_triton,
)
from tp_engine.kernels.attention.paged_prefill_triton import paged_prefill_triton, prefill_sizes
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.kv_cache.layer_kv import (
    LARGEST_VALUE,
    SCALE_DTYPE,
    KeyValue,
    LayerKv,
    dequantise,
    is_quantised,
    layer_view,
    store_kv,
)
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.worker.memory.kv_cache import KvCacheShape

INT8, FP8 = LARGEST_VALUE
DECODES = [(1, 40), (1, 1), (1, 0), (1, 300), (1, 65)]
CHUNKS = [(1, 40), (1, 1), (30, 30), (5, 100), (1, 9), (2, 64), (40, 50)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small specialisation; ``splits`` is for decodes: up to 4, of ``long_keys`` keys each."""

    head_dim: int = 64
    group: int = 4
    num_kv_heads: int = 2
    window: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    splits: int = 4
    long_keys: int = 512
    query_len: int = 1
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def shape(self) -> AttentionShape:
        """The shape of one layer.  The sinks are about as large as the scores; the last sink is so large that no score
        counts."""
        num_heads = self.group * self.num_kv_heads
        sinks = torch.linspace(-5, 5, num_heads)
        sinks[-1] = 200.0
        return AttentionShape(
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=self.window,
            softcap=self.softcap,
            sinks=sinks if self.has_sinks else None,
        )


DECODE_CASES = (
    Case(splits=1),
    Case(splits=1, long_keys=64),
    Case(splits=1, window=20, head_dim=80, group=3),
    Case(window=1, group=1, block_size=32),
    Case(window=100, head_dim=112, group=7, num_kv_heads=1),
    Case(dtype=torch.float16, head_dim=128, block_size=256),
    Case(head_dim=256, group=20, num_kv_heads=1),
    Case(head_dim=512, group=2, num_kv_heads=1, cache_dtype=INT8),
    Case(dtype=torch.float16, cache_dtype=INT8),
    Case(dtype=torch.float16, cache_dtype=FP8, splits=1),
    Case(cache_dtype=INT8, head_dim=96, block_size=64),
    Case(cache_dtype=torch.float16),
    Case(query_len=3, window=33),
    Case(softcap=2.0),
    Case(softcap=1.0, splits=1, window=20, head_dim=80, group=3),
    Case(has_sinks=True),
    Case(has_sinks=True, splits=1, long_keys=64, group=1),
    Case(has_sinks=True, query_len=3, window=33, head_dim=80),
    Case(has_sinks=True, softcap=1.5, dtype=torch.float16, cache_dtype=INT8, window=100),
)
PREFILL_CASES = (
    Case(),
    Case(window=20, head_dim=80, group=3),
    Case(dtype=torch.float16, head_dim=128, block_size=256, group=1, num_kv_heads=1),
    Case(dtype=torch.float16, cache_dtype=INT8),
    Case(cache_dtype=FP8, group=7, num_kv_heads=1, window=33),
    Case(softcap=2.0),
    Case(has_sinks=True, window=20, head_dim=80, group=3),
    Case(has_sinks=True, softcap=1.5, dtype=torch.float16, cache_dtype=INT8),
    Case(head_dim=512, group=2, num_kv_heads=1, cache_dtype=INT8),
)
BFLOAT16_CASES = (
    Case(dtype=torch.bfloat16, head_dim=128),
    Case(dtype=torch.bfloat16, head_dim=128, block_size=256, splits=1),
    Case(dtype=torch.bfloat16, head_dim=256, group=2),
    Case(dtype=torch.bfloat16, head_dim=512, group=8, num_kv_heads=1),
    Case(dtype=torch.bfloat16, head_dim=96, group=1, window=50),
    Case(dtype=torch.bfloat16, head_dim=128, group=8, cache_dtype=FP8),
    Case(dtype=torch.bfloat16, head_dim=128, cache_dtype=INT8, window=70),
    Case(dtype=torch.bfloat16, head_dim=256, group=2, softcap=2.0, window=50),
    Case(dtype=torch.bfloat16, group=8, has_sinks=True),
    Case(dtype=torch.bfloat16, group=8, has_sinks=True, window=50, cache_dtype=FP8),
)


def stored_batch(case: Case, requests: list[tuple[int, int]], device: str = "cpu") -> tuple[PagedBatch, Any]:
    """A step whose keys and values are all in the cache, with the scales of a quantised cache."""
    batch = make_batch(requests, case.shape, block_size=case.block_size, dtype=case.dtype, device=device)
    cache_dtype, scales = case.cache_dtype or case.dtype, None
    stored = torch.zeros(batch.kv_cache.shape, dtype=cache_dtype, device=device)
    _, num_blocks, block_size, num_kv_heads, _ = stored.shape
    if is_quantised(cache_dtype):
        scales = torch.full((2, num_blocks, num_kv_heads, block_size), float("nan"), dtype=SCALE_DTYPE, device=device)
    slots = torch.arange(num_blocks * block_size, device=device)
    store_kv(batch.new, LayerKv(batch.kv_cache), batch.metadata.slot_mapping)
    states = batch.kv_cache.flatten(1, 2)
    owned = ~states[0].isnan().flatten(1).any(1)
    store_kv(KeyValue(states[0][owned], states[1][owned]), LayerKv(stored, scales), slots[owned])
    if not is_quantised(cache_dtype):
        stored.view(states.shape)[:, ~owned] = float("nan")
    batch.kv_cache = among_layers(stored)
    return batch, None if scales is None else among_layers(scales)


def expected_of(batch: PagedBatch, scales: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    """The twin's output in float32 from the values in the cache, and the twin's error in the query's own type."""
    shape, metadata = batch.shape, batch.metadata
    tables = (metadata.block_table, metadata.seq_lens, metadata.query_start)
    exact_cache = batch.kv_cache.float()
    if scales is not None:
        exact_cache = dequantise(batch.kv_cache, scales.transpose(2, 3))
    rule = rule_of(shape, batch.query.device)
    exact = paged_attention(batch.query.float(), LayerKv(exact_cache), *tables, **rule)
    plain = paged_attention(batch.query, LayerKv(batch.kv_cache, scales), *tables, **rule)
    return exact, float((plain.float() - exact).abs().max())


def rule_of(shape: AttentionShape, device: torch.device) -> dict[str, Any]:
    """The layer's attention rule, as all implementations take it."""
    sinks = None if shape.sinks is None else shape.sinks.to(device)
    return {"scale": shape.scale, "window": shape.sliding_window, "softcap": shape.softcap, "sinks": sinks}


def run_decode(case: Case, device: str = "cpu") -> None:
    """Requests of ``query_len`` queries; the error is at most twice the twin's, or that of another order in float32."""
    requests = [(case.query_len, seq_len + case.query_len if seq_len else 0) for _, seq_len in DECODES]
    if case.query_len > 1:
        requests = [request for request in requests if request[1]]
    batch, scales = stored_batch(case, requests, device)
    compare(case, run_on(batch, scales, case), *expected_of(batch, scales))


def run_on(batch: PagedBatch, scales: torch.Tensor | None, case: Case) -> torch.Tensor:
    """The decode kernel's output for a stored batch."""
    device, quantised = batch.query.device, scales is not None
    sizes = decode_sizes(1, case.num_kv_heads, case.head_dim, case.dtype.itemsize, 132, is_quantised=quantised)
    most = 4 if case.long_keys < 512 else case.splits
    sizes = replace(sizes, usual_splits=case.splits, num_splits=most, long_keys=case.long_keys)
    out = torch.full_like(batch.query, float("nan"))
    paged_decode_triton(
        batch.query,
        LayerKv(batch.kv_cache, scales),
        batch.metadata.block_table,
        batch.metadata.seq_lens,
        out,
        sizes=sizes,
        arrivals=(arrivals := torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)),
        query_len=case.query_len,
        **rule_of(case.shape, batch.query.device),
    )
    assert not arrivals.any(), "a later launch would join too early"
    return out


def run_fixed(case: Case, device: str = "cpu") -> None:
    """With splits by length alone, each request alone has its bits in the batch."""
    batch, scales = stored_batch(case, [(1, length + 1) for _, length in DECODES if length], device)
    sizes = decode_sizes(4, case.num_kv_heads, case.head_dim, case.dtype.itemsize, 132, is_fixed=True)
    sizes, metadata = replace(sizes, long_keys=case.long_keys), batch.metadata

    def attend(own: slice) -> torch.Tensor:
        out = torch.full_like(batch.query[own], float("nan"))
        paged_decode_triton(
            batch.query[own],
            LayerKv(batch.kv_cache, scales),
            metadata.block_table[own],
            metadata.seq_lens[own],
            out,
            sizes=sizes,
            arrivals=torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device),
            **rule_of(case.shape, batch.query.device),
        )
        return out

    whole = attend(slice(None))
    compare(case, whole, *expected_of(batch, scales))
    for request in range(len(whole)):
        own = slice(request, request + 1)
        assert torch.equal(attend(own), whole[own]), request


def run_prefill(case: Case, device: str = "cpu") -> None:
    """Chunks after two decodes, which the kernel skips."""
    batch, scales = stored_batch(case, CHUNKS, device)
    sizes = prefill_sizes(case.head_dim, case.dtype.itemsize)
    first, out = 2, torch.full_like(batch.query, 7.0)
    paged_prefill_triton(
        batch.query,
        LayerKv(batch.kv_cache, scales),
        batch.metadata.block_table,
        batch.metadata.seq_lens,
        batch.metadata.query_start,
        out,
        sizes=sizes,
        num_queries=len(batch.query) - first,
        first_request=first,
        **rule_of(case.shape, batch.query.device),
    )
    assert bool((out[:first] == 7.0).all())
    exact, error = expected_of(batch, scales)
    compare(case, out[first:], exact[first:], error)


def compare(case: Case, out: torch.Tensor, exact: torch.Tensor, plain_error: float) -> None:
    """At most twice the plain error, or a few units in the last place of float32."""
    error = float((out.float() - exact).abs().max())
    assert error <= max(2 * plain_error, 2e-6), f"{case}: error {error}, in plain PyTorch {plain_error}"


def _name(kind: str, case: Case) -> str:
    """The fields that differ from the defaults."""
    parts = [f"{field.name} {getattr(case, field.name)}" for field in fields(case)]
    plain = {f"{field.name} {field.default}" for field in fields(case)}
    return ", ".join([kind, *(part.replace("torch.", "") for part in parts if part not in plain)])


FIXED_CASES = (Case(long_keys=128),)

CASES: dict[str, Callable[[str], None]] = {
    _name(kind, case): partial(run, case)
    for kind, run, cases in (
        ("decode", run_decode, DECODE_CASES + BFLOAT16_CASES),
        ("prefill", run_prefill, PREFILL_CASES + BFLOAT16_CASES),
        ("fixed splits", run_fixed, FIXED_CASES),
    )
    for case in cases
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One rank's part of a model, and its types."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


LAUNCHES = (
    Launch(16, 8, 128, torch.bfloat16, torch.bfloat16, 16),  # Qwen3-0.6B
    Launch(8, 1, 128, torch.bfloat16, FP8, 16),  # Qwen3-32B on 8 ranks
    Launch(32, 8, 128, torch.float16, torch.float16, 256, 4096),  # Mistral
    Launch(7, 1, 128, torch.float16, INT8, 256),  # Qwen2.5-7B on 4
    Launch(32, 32, 96, torch.bfloat16, INT8, 16),  # Phi-3-mini
    Launch(8, 4, 256, torch.bfloat16, torch.bfloat16, 16),  # Gemma
    Launch(8, 8, 64, torch.float32, torch.float32, 32),  # the tests' precision
    Launch(8, 4, 256, torch.bfloat16, torch.bfloat16, 16, 4096, softcap=50.0),  # Gemma 2
    Launch(16, 2, 64, torch.bfloat16, torch.bfloat16, 16, 128, has_sinks=True),  # gpt-oss on 4
    Launch(8, 1, 64, torch.bfloat16, FP8, 16, has_sinks=True),  # gpt-oss on 8, a layer without a window
    Launch(16, 2, 512, torch.bfloat16, torch.bfloat16, 16),  # Gemma 4, a full layer
    Launch(8, 1, 512, torch.bfloat16, INT8, 16),
    Launch(8, 1, 512, torch.float32, torch.float32, 16),
)
# Everything on sm_90.  The others cover both types, each cache, the smallest and largest head_dim and block_size, a
# window, a cap and sinks.
LAUNCHES_OF = {
    80: (0, 2, 4, 8, 10),
    90: range(len(LAUNCHES)),
    100: (1, 3, 5, 7, 9, 10),
    120: (5, 7, 9, 10, 11),
}


def launches(capability: int) -> Iterator[dict[str, Any]]:
    """The arguments that both kernels take, as the engine calls them, without memory."""
    for model in (LAUNCHES[number] for number in LAUNCHES_OF[capability]):
        heads, kv_heads, head_dim, block_size = model.num_heads, model.num_kv_heads, model.head_dim, model.block_size
        merged = torch.empty(64, heads + 2 * kv_heads, head_dim, dtype=model.dtype, device="meta")
        layout = lay_out([KvKind(window=None, num_kv_heads=kv_heads, head_dim=head_dim)] * 5)
        shape = KvCacheShape(layout=layout, block_size=block_size, dtype=model.cache_dtype)
        cache, scales = shape.views_of(torch.empty(100, shape.block_bytes, dtype=torch.uint8, device="meta"))
        yield {
            "query": merged[:, :heads],
            "kv": LayerKv(layer_view(cache, 1), None if scales is None else layer_view(scales, 1)),
            "block_table": torch.empty(64, 100, dtype=torch.int32, device="meta"),
            "out": torch.empty(64, heads, head_dim, dtype=model.dtype, device="meta"),
            "scale": head_dim**-0.5,
            "window": model.window,
            "softcap": model.softcap,
            "sinks": torch.empty(heads, dtype=torch.float32, device="meta") if model.has_sinks else None,
        }


def launch_all(capability: int) -> None:
    """Decodes with and without splits; chunks."""
    for number, call in enumerate(launches(capability)):
        num_kv_heads, head_dim = call["kv"].cache.shape[3:]
        itemsize = call["query"].dtype.itemsize
        seq_lens = torch.empty(64, dtype=torch.int32, device="meta")
        for num_requests in (64, 100_000) if number % 2 == 0 else (64,):
            quantised = call["kv"].scales is not None
            sizes = decode_sizes(num_requests, num_kv_heads, head_dim, itemsize, 132, is_quantised=quantised)
            arrivals = torch.empty(MAX_ARRIVALS, dtype=torch.int32, device="meta")
            paged_decode_triton(**call, seq_lens=seq_lens, sizes=sizes, arrivals=arrivals)
        if number < 2:  # the same code with another constant
            sizes = decode_sizes(64, num_kv_heads, head_dim, itemsize, 132, is_quantised=quantised, is_fixed=True)
            paged_decode_triton(**call, seq_lens=seq_lens, sizes=sizes, arrivals=arrivals)
        query_start = torch.empty(65, dtype=torch.int32, device="meta")
        paged_prefill_triton(
            **call,
            seq_lens=seq_lens,
            query_start=query_start,
            sizes=prefill_sizes(head_dim, itemsize, SHARED_MEMORY[capability]),
            num_queries=60,
            first_request=2,
        )
