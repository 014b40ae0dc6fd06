"""Latent attention by Triton: interpreted against the PyTorch twins and on CUDA (``CASES``), and launches of
real models (``launch_all``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.paged_batches import PagedBatch, among_layers, make_batch
from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, Case, assert_close_enough, both, random
from tests.unit.kernels.kernel_harness import SHARED_MEMORY
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.expanded import Tiles, tile_bytes, tiles_of
from tp_engine.kernels.attention.expanded_triton import ExpandedSizes, expanded_prefill_triton
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS
from tp_engine.kernels.attention.paged_mla_triton import latent_sizes, mla_chunks_triton, mla_decode_triton
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.candidates import Shape
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, SCALE_DTYPE, KeyValue, LayerKv, dequantise, store_kv
from tp_engine.kernels.layer_ops import NormRule

INT8, FP8 = LARGEST_VALUE
BFLOAT16 = torch.bfloat16
# Query and all tokens of each request; lengths around the edges of blocks, tiles and splits; (1, 0) is padding.
DECODES = [(1, 16), (1, 1), (1, 0), (1, 17), (1, 31), (1, 33), (1, 130)]
CHUNKS = [(1, 16), (1, 0), (9, 9), (5, 64), (1, 33), (2, 17), (20, 40)]
NUM_DECODES = 2  # of the step with chunks


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One small specialisation: a latent of ``rank`` and ``rope`` elements for ``heads`` heads; up to ``splits``
    splits, or more where one has more than ``long_keys``."""

    heads: int
    rank: int = 24
    rope: int = 8
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    block_size: int = 16
    splits: int = 4
    long_keys: int = 512


SMALL = tuple(Rows(heads=heads, splits=1 + 3 * (heads % 2)) for heads in (1, 3, 16, 20, 128))
REAL = (
    Rows(heads=5, rank=256, rope=64, dtype=torch.bfloat16, block_size=64),
    Rows(heads=16, rank=512, rope=64, dtype=torch.bfloat16, cache_dtype=INT8, block_size=32),
)
OTHERS = (
    Rows(heads=4, splits=1, long_keys=32),
    Rows(heads=40, dtype=torch.float16),
    Rows(heads=4, rank=40, rope=20, cache_dtype=INT8),
    Rows(heads=4, dtype=torch.float16, cache_dtype=FP8),
    Rows(heads=4, dtype=torch.bfloat16, cache_dtype=FP8, block_size=4),
)


def stored_batch(
    case: Rows, requests: list[tuple[int, int]], device: str
) -> tuple[PagedBatch, LayerKv, LayerKv | None]:
    """A step whose rows are all stored, and the cache; of a quantised one also what it holds, in float32.

    Memory that no request owns is NaN, or has scales of NaN.
    """
    width = case.rank + case.rope
    shape = AttentionShape(num_heads=case.heads, num_kv_heads=1, head_dim=width, scale=width**-0.5, value_dim=case.rank)
    batch = make_batch(requests, shape, block_size=case.block_size, dtype=case.dtype, device=device)
    store_kv(batch.new, LayerKv(batch.kv_cache), batch.metadata.slot_mapping)
    plain = batch.kv_cache[:1]
    if case.cache_dtype is None:
        return batch, LayerKv(among_layers(plain)), None
    rows = plain.flatten(1, 2)[0]
    owned = (~rows.isnan().flatten(1).any(1)).nonzero().squeeze(1)
    cache = torch.zeros(plain.shape, dtype=case.cache_dtype, device=device)
    scales = torch.full((1, plain.shape[1], 1, case.block_size), float("nan"), dtype=SCALE_DTYPE, device=device)
    store_kv(KeyValue(rows[owned], rows[owned]), LayerKv(cache, scales), owned)
    exact = LayerKv(dequantise(cache, scales.transpose(2, 3)))
    return batch, LayerKv(among_layers(cache), among_layers(scales)), exact


def check_rows(device: str, case: Rows) -> None:
    """A step of decodes, then one of chunks after two decodes, which its kernel leaves alone."""
    for requests in (DECODES, CHUNKS):
        batch, kv, exact_kv = stored_batch(case, requests, device)
        metadata, first = batch.metadata, 0 if requests is DECODES else NUM_DECODES
        tables = metadata.block_table, metadata.seq_lens
        rule: dict[str, Any] = {"scale": batch.shape.scale, "value_dim": case.rank}
        plain = paged_attention(batch.query, kv, *tables, metadata.query_start, **rule)
        wide_kv = LayerKv(kv.cache.float()) if exact_kv is None else exact_kv
        exact = paged_attention(batch.query.float(), wide_kv, *tables, metadata.query_start, **rule).double()
        num_queries = len(batch.query) - first
        sizes = latent_sizes(1, case.heads, case.dtype.itemsize, 132)
        sizes = replace(sizes, usual_splits=case.splits, num_splits=4, long_keys=case.long_keys)
        sizes = replace(sizes, most_rows=32)
        if case.splits == 1 and case.long_keys == 512:
            sizes = replace(sizes, num_splits=1)
        out = torch.full_like(plain, 7.0)
        call: dict[str, Any] = {
            "scale": batch.shape.scale,
            "sizes": sizes,
            "arrivals": (arrivals := torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)),
        }
        if requests is DECODES:
            mla_decode_triton(batch.query, kv, *tables, out, **call)
        else:
            call |= {"num_queries": num_queries, "first_request": first}
            mla_chunks_triton(batch.query, kv, *tables, metadata.query_start, out, **call)
        assert bool((out[:first] == 7.0).all()) and not arrivals.any(), "a later launch would join too early"
        granted = 16 if case.dtype == torch.float32 else 1e-2
        assert_close_enough(out[first:], plain[first:], exact[first:], granted)


# Heads, nope, rope, rank.
PREPARED = ((3, 22, 6, 70), (20, 16, 8, 32), (1, 128, 64, 512))


def check_prepared(
    device: str, sizes: tuple[int, ...], dtype: torch.dtype, is_interleaved: bool, cache_dtype: torch.dtype | None
) -> None:
    """Slices of wider rows; with scaled queries, without, and without rotation; stored at their slots, and without a
    cache."""
    prepare, twin = both("prepare_latents")
    heads, nope, rope, rank = sizes
    count, width = 5, heads * (nope + rope)
    joined = random((count, width + rank + rope + 5), dtype, device)
    positions = torch.tensor([0, 29, 7, 7, 3], device=device)
    slots = torch.tensor([3, -1, 19, 0, 7], device=device)
    table, weight = random((30, rope), dtype, device, 1), random((rank,), dtype, device, 2)
    scales_of_queries = random((30,), torch.float32, device, 3)
    for turning in ((None,), (scales_of_queries,), ()):

        def run(operation: Any, wide: bool, kv: LayerKv | None, turning: tuple[Any, ...] = turning) -> Any:
            given = [one.double() if wide else one.clone() for one in (joined, table, weight)]
            query = given[0][:, :width].view(count, heads, -1)
            rule = NormRule(given[2], 1e-6)
            rotation = Rotation(given[1], positions, *turning) if turning else None
            return operation(query, given[0][:, width:-5], rule, rotation, is_interleaved, kv, slots)

        exact, plain, found = run(twin, True, None), run(twin, False, None), run(prepare, False, None)
        for one, other, wanted in zip(found, plain, exact, strict=True):
            assert_close_enough(one, other, wanted, granted=wanted.abs().max().item())
        caches = []
        for rows in (found[1], None):
            stored = torch.zeros(1, 5, 4, 1, rank + rope, dtype=cache_dtype or dtype, device=device)
            scales = None if cache_dtype is None else among_layers(torch.zeros(1, 5, 1, 4, device=device))
            kv = LayerKv(among_layers(stored), scales)
            if rows is None:
                query, left = run(prepare, False, kv)
                assert torch.equal(query, found[0])
                if left is not None:  # to the backend, as by the twin
                    store_kv(KeyValue(left, left), kv, slots)
            else:
                store_kv(KeyValue(rows, rows), kv, slots)
            caches.append(kv)
        for name in ("cache", "scales"):
            one, other = (getattr(kv, name) for kv in caches)
            if one is not None:
                assert one.float().count_nonzero()
                # A value between two steps of 8 bits may round to either.
                relative, absolute = {INT8: (0.0, 1.0), FP8: (0.13, 0.01)}.get(one.dtype, (0.0, 0.0))
                differs = (one.float() != other.float()).float().mean().item()
                assert differs <= (0.01 if absolute else 0), f"{differs:.1%} of the {name} differ"
                torch.testing.assert_close(other.float(), one.float(), rtol=relative, atol=absolute)


def check_maps(device: str, count: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Queries that are slices of wider rows, and means; sizes that no vector divides, and numbers of tokens around
    those that share what is read."""
    heads, nope, rope, rank = sizes
    up = random((heads, nope + 10, rank), dtype, device) * rank**-0.5
    joined = random((count, heads * (nope + rope) + 5), dtype, device, 1)
    query, means = joined[:, :-5].view(count, heads, -1), random((count, heads, rank), dtype, device, 2)
    for name, x in (("absorb_w_uk", query), ("project_w_uv", means)):
        operation, twin = both(name)
        exact = twin(x.double(), up.double(), nope)
        found = operation(x, up, nope)
        assert found.is_contiguous()
        assert_close_enough(found, twin(x, up, nope), exact, granted=exact.abs().max().item())


CASES: dict[str, Case] = {
    **{
        f"maps-{count}-{sizes}-{dtype}": partial(check_maps, count=count, sizes=sizes, dtype=dtype)
        for sizes, dtype, counts in (
            *((PREPARED[0], dtype, (1, 3, 4, 9, 70)) for dtype in DTYPES),
            (PREPARED[2], BFLOAT16, (2,)),
        )
        for count in counts
    },
    **{f"rows-{case}": partial(check_rows, case=case) for case in (*SMALL, *REAL, *OTHERS)},
    **{
        f"prepare-{sizes}-{dtype}-{kind}": partial(
            check_prepared, sizes=sizes, dtype=dtype, is_interleaved=kind[0], cache_dtype=kind[1]
        )
        for (sizes, dtype), kind in zip(
            product(PREPARED, DTYPES),
            [(True, None), (False, INT8), (True, FP8), (False, None), (True, INT8), (False, None), (True, INT8)] * 2,
            strict=False,
        )
    },
}
# Heads of this rank, rank, rope, nope, and the types: DeepSeek-V3 on one rank, V2-Lite or V3 on 8, GLM-4.7-Flash,
# Mistral Small 4 on 4, one head, and the tests' precision.
MODELS = (
    (128, 512, 64, 128, BFLOAT16, None),
    (16, 512, 64, 128, BFLOAT16, None),
    (20, 512, 64, 192, BFLOAT16, INT8),
    (8, 256, 64, 64, BFLOAT16, None),
    (1, 512, 64, 128, torch.float16, FP8),
    (4, 128, 16, 16, torch.float32, None),
)
# The first is launched in all ways, the others as decodes with splits.  8-bit floats need 8.9.
MODELS_OF = {80: (0, 2), 90: range(len(MODELS)), 100: (0, 4), 120: (0, 2, 4)}


def launch_model(number: int, num_decodes: int, num_tokens: int, num_chunks: int = 1) -> None:
    """One layer's launches of a step of ``MODELS[number]``, whose inputs begin a batch with prompts."""
    heads, rank, rope, nope, dtype, cache_dtype = MODELS[number]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = empty(100, 3, 1, 16, 1, rank + rope, dtype=cache_dtype or dtype)[:, 1].transpose(0, 1)
    scales = None if cache_dtype is None else empty(100, 3, 1, 1, 16, dtype=SCALE_DTYPE)[:, 1].transpose(0, 1)
    kv, slots = LayerKv(cache, scales), empty(num_tokens, dtype=torch.int64)
    joined = empty(num_tokens, heads * (nope + rope) + rank + rope)
    query, rows = joined.split_with_sizes((heads * (nope + rope), rank + rope), 1)
    scale = empty(4096, dtype=torch.float32) if number == 3 else None
    rotation = Rotation(empty(4096, rope), empty(num_tokens, dtype=torch.int64), scale)
    rule = NormRule(empty(rank), 1e-6)
    both("prepare_latents")[0](query.view(num_tokens, heads, -1), rows, rule, rotation, number != 2, kv, slots)
    num_requests = num_decodes + num_chunks
    table, seq_lens = (empty(num_requests, *width, dtype=torch.int32) for width in ((100,), ()))
    absorbed, out = empty(num_tokens, heads, rank + rope), empty(num_tokens, heads, rank)
    size = heads, dtype.itemsize, 132
    call: dict[str, Any] = {"scale": 0.1, "arrivals": empty(MAX_ARRIVALS, dtype=torch.int32)}
    if num_decodes:
        part = absorbed[:num_decodes], kv, table[:num_decodes], seq_lens[:num_decodes], out[:num_decodes]
        mla_decode_triton(*part, sizes=latent_sizes(num_decodes, *size), **call)
    if num_queries := num_tokens - num_decodes:
        starts, sizes = empty(num_requests + 1, dtype=torch.int32), latent_sizes(1, *size, num_queries=num_queries)
        call |= {"sizes": sizes, "num_queries": num_queries, "first_request": num_decodes}
        mla_chunks_triton(absorbed, kv, table, seq_lens, starts, out, **call)


def launch_expanded(capability: int, number: int, most: int = 1, num_tokens: int = 640) -> list[Tiles]:
    """Launch a long chunk's attention of ``MODELS[number]`` in the first ``most`` sizes that fit; returns these."""
    heads, _, rope, nope, dtype, _ = MODELS[number]
    value = max(nope, 128)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape: Shape = {"nope": nope, "rope": rope, "value": value, "type": str(dtype).removeprefix("torch.")}
    fitting = [one for one in tiles_of(shape) if tile_bytes(one, shape) <= SHARED_MEMORY[capability]][:most]
    inputs = (empty(num_tokens, heads, nope + rope), empty(num_tokens, heads, value))
    keys = empty(2 * num_tokens, heads, nope + value), empty(2 * num_tokens, rope + 512)[:, 512:]
    for tiles in fitting:
        expanded_prefill_triton(*inputs, *keys, scale=0.1, sizes=ExpandedSizes(*tiles))
    return fitting


def launch_all(capability: int) -> None:
    """Decodes with and without splits; chunks, short and long."""
    from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

    launch_model(0, 1024, 1024)
    for number in MODELS_OF[capability]:
        launch_model(number, 2, 66 if number == 0 else 2)
        launch_expanded(capability, number)
        # What a pair of backends stores: rows of a cache with one part.
        _, rank, rope, _, dtype, cache_dtype = MODELS[number]
        rows = torch.empty(7, 1, rank + rope, dtype=dtype, device="meta")
        cache = torch.empty(1, 100, 16, 1, rank + rope, dtype=cache_dtype or dtype, device="meta")
        scales = None if cache_dtype is None else torch.empty(1, 100, 1, 16, device="meta")
        slots = torch.empty(7, dtype=torch.int64, device="meta")
        store_kv_triton(KeyValue(rows, rows[..., :rank]), LayerKv(cache, scales), slots)
