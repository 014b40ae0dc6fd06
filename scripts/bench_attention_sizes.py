#!/usr/bin/env python
"""Find the best sizes for the paged attention kernels on this GPU: time every candidate and mark the current one.

Decodes are compared with the bandwidth of a plain copy in the same run, prompts with the rate of a large matrix
product.  The sizes in use are in ``decode_sizes`` and ``prefill_sizes`` (tp_engine/kernels).  Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence

import torch
from bench_kernels import SHAPES, number_of_sets, seconds_per_launch
from benchmarks.kernels.attention import decode_bytes, prefill_flops
from benchmarks.kernels.cases import Shape, random_cache
from benchmarks.machine import copy_bandwidth, matmul_rate, processor_name

from tp_engine.kernels.kv_cache.layer_kv import LayerKv, is_quantised

CACHE_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DECODE_TILES, DECODE_WARPS, DECODE_STAGES, SPLIT_FACTORS = (32, 64, 128), (2, 4, 8), (2, 3, 5), (0.5, 1, 4)
PREFILL_ROWS, PREFILL_TILES, PREFILL_WARPS, PREFILL_STAGES = (64, 128), (32, 64, 128), (4, 8), (2, 3)


def decode_rows(
    shape: Shape, num_requests: int, length: int, cache_dtype: torch.dtype, bandwidth: float
) -> Iterator[dict[str, object]]:
    """One row per candidate, the current sizes first."""
    from tp_engine.kernels.attention.paged_decode_triton import (
        MAX_ARRIVALS,
        MAX_SPLITS,
        DecodeSizes,
        decode_sizes,
        paged_decode_triton,
    )

    columns = -(-length // shape.block_size)
    num_bytes = decode_bytes(shape, num_requests, length, cache_dtype)
    properties = torch.cuda.get_device_properties(0)
    current = decode_sizes(
        num_requests,
        shape.num_kv_heads,
        shape.head_dim,
        shape.dtype.itemsize,
        properties.multi_processor_count,
        is_quantised=is_quantised(cache_dtype),
    )
    splits = sorted({min(MAX_SPLITS, max(1, int(current.usual_splits * factor))) for factor in SPLIT_FACTORS})
    candidates = [
        DecodeSizes(
            tile=tile,
            num_warps=warps,
            num_stages=stages,
            usual_splits=count,
            num_splits=max(count, current.num_splits),
        )
        for tile, warps, stages, count in itertools.product(DECODE_TILES, DECODE_WARPS, DECODE_STAGES, splits)
    ]
    sets = []
    for _ in range(number_of_sets(num_bytes, properties.L2_cache_size)):
        cache, scales = random_cache(shape, num_requests * columns, cache_dtype)
        table = torch.randperm(num_requests * columns, device="cuda").to(torch.int32).view(num_requests, columns)
        sets.append((LayerKv(cache, scales), table))
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device="cuda")
    query = torch.randn(num_requests, shape.num_heads, shape.head_dim, device="cuda").to(shape.dtype)
    out, arrivals = torch.empty_like(query), torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=query.device)
    for sizes in [current, *(one for one in candidates if one != current)]:
        launches = [
            lambda one=one, sizes=sizes: paged_decode_triton(
                query, one[0], one[1], seq_lens, out, scale=0.1, sizes=sizes, arrivals=arrivals
            )
            for one in sets
        ]
        row: dict[str, object] = {"kernel": "decode", "sizes": str(sizes), "is_current": sizes == current}
        try:
            seconds = seconds_per_launch(launches, 10)
        except Exception as error:  # for example, too much shared memory
            yield row | {"error": f"{type(error).__name__}: {error}"}
            continue
        yield row | {"us": round(seconds * 1e6, 2), "share": round(num_bytes / seconds / bandwidth, 3)}


def prefill_rows(
    shape: Shape, num_requests: int, length: int, cache_dtype: torch.dtype, rate: float
) -> Iterator[dict[str, object]]:
    """One row per candidate, the current sizes first."""
    from tp_engine.kernels.attention.paged_prefill_triton import PrefillSizes, paged_prefill_triton, prefill_sizes

    columns = -(-length // shape.block_size)
    cache, scales = random_cache(shape, num_requests * columns, cache_dtype)
    table = torch.randperm(num_requests * columns, device="cuda").to(torch.int32).view(num_requests, columns)
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device="cuda")
    query_start = torch.arange(num_requests + 1, dtype=torch.int32, device="cuda") * length
    query = torch.randn(num_requests * length, shape.num_heads, shape.head_dim, device="cuda").to(shape.dtype)
    out = torch.empty_like(query)
    current = prefill_sizes(shape.head_dim, shape.dtype.itemsize)
    candidates = [
        PrefillSizes(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
        for rows, tile, warps, stages in itertools.product(PREFILL_ROWS, PREFILL_TILES, PREFILL_WARPS, PREFILL_STAGES)
    ]
    for sizes in [current, *(one for one in candidates if one != current)]:
        row: dict[str, object] = {"kernel": "prefill", "sizes": str(sizes), "is_current": sizes == current}

        def launch(sizes: PrefillSizes = sizes) -> None:
            paged_prefill_triton(
                query,
                LayerKv(cache, scales),
                table,
                seq_lens,
                query_start,
                out,
                scale=0.1,
                sizes=sizes,
                num_queries=len(query),
            )

        try:
            seconds = seconds_per_launch([launch], 5)
        except Exception as error:
            yield row | {"error": f"{type(error).__name__}: {error}"}
            continue
        share = num_requests * prefill_flops(shape, length) / seconds / rate
        yield row | {"us": round(seconds * 1e6, 2), "share": round(share, 3)}


def report(title: str, rows: Iterator[dict[str, object]], best: int) -> list[dict[str, object]]:
    """Print the current sizes and the ``best`` others; returns all rows."""
    kept = list(rows)
    timed = sorted((row for row in kept if "us" in row), key=lambda row: float(str(row["us"])))
    print(f"{title}: {len(timed)} of {len(kept)} candidates ran")
    for row in [row for row in kept if row["is_current"]] + timed[:best]:
        outcome = row.get("error") or f"{row['us']:>10} us  {float(str(row['share'])):6.1%}"
        print(f"  {'current' if row['is_current'] else '':8} {outcome}  {row['sizes']}", flush=True)
    return [row | {"case": title} for row in kept]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="requests per decode step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--prompts", type=int, default=8, help="new prompts of that length in a prefill step")
    parser.add_argument("--best", type=int, default=3, help="candidates to print beside the current one")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_attention_sizes times CUDA kernels, and torch finds no CUDA GPU", file=sys.stderr)
        return 2
    shape, cache_dtype = SHAPES[args.shape], CACHE_DTYPES[args.kv_cache_dtype]
    bandwidth, rate = copy_bandwidth(), matmul_rate(shape.dtype)
    print(f"{processor_name()}: copies at {bandwidth / 1e9:,.0f} GB/s, matrix products at {rate / 1e12:,.0f} TFLOP/s")
    rows: list[dict[str, object]] = []
    for batch in args.batch:
        found = decode_rows(shape, batch, args.length, cache_dtype, bandwidth)
        rows += report(f"decode {batch} x {args.length}", found, args.best)
        torch.cuda.empty_cache()
    found = prefill_rows(shape, args.prompts, args.length, cache_dtype, rate)
    rows += report(f"prefill {args.prompts} x {args.length}", found, args.best)
    facts = {"benchmark": "attention_sizes", "device": processor_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"shape": shape.name, "kv_cache_dtype": args.kv_cache_dtype, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
