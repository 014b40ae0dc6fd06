#!/usr/bin/env python
"""Time a linear layer's product on this CPU, several ways side by side.  Ends with one JSON line.

Ways: ``F.linear``; oneDNN with a packed weight; this project's product with a weight in panels (``PackedWeight``), and
with random codes of ``--quantised`` kinds (``QuantisedPanels``), whose GB/s are those of the unquantised weight.
Several copies of the weight take turns and together exceed the caches, as the layers of a model do.  The ways
alternate, and each time is the best of several.  Beside it: the weight's bytes per second, and their share of the read
bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.machine import processor_name, read_bandwidth

from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.native.linear import PackedWeight
from tp_engine.kernels.native.quantised import QuantisedPanels
from tp_engine.kernels.quantised.weights import Codes, QuantisedWeight, values_per_byte

Product = Callable[..., torch.Tensor]

SHAPES = ((1024, 3072), (3072, 1024), (4096, 1024), (151936, 1024), (768, 2048), (256, 688))  # (out, in)
ROWS = (1, 2, 4, 8, 16, 32, 64)
MAX_COPIES = 64
# Codes, group (0: no scales), type of the scales, rows that share one.
QUANTISED: dict[str, tuple[Codes, int, torch.dtype, int]] = {
    "int4_32": ("int4", 32, torch.bfloat16, 1),
    "int4_128": ("int4", 128, torch.bfloat16, 1),
    "nvfp4": ("e2m1", 16, torch.float8_e4m3fn, 1),
    "mxfp4": ("e2m1", 32, torch.float8_e8m0fnu, 1),
    "int8": ("int8", 0, torch.float32, 1),
    "fp8": ("e4m3", 128, torch.float32, 128),
}


def quantised(shape: torch.Size, name: str) -> QuantisedWeight:
    """Random codes, without NaN and -128; scales are 1."""
    (out_size, in_size), (kind, group, dtype, row_block) = shape, QUANTISED[name]
    codes = torch.randint(256, (out_size, in_size // values_per_byte(kind))).to(torch.uint8)
    scales = torch.ones(-(-out_size // row_block), -(-in_size // group)).to(dtype) if group else None
    codes = codes.masked_fill((codes & 127 == 127) | (codes == 128), 1)
    return QuantisedWeight(kind=kind, codes=codes, scales=scales, group=group, row_block=row_block)


def ways(weight: torch.Tensor, names: list[str]) -> dict[str, tuple[Product, torch.Tensor]]:
    """Each way's product, and the weight in the form that it needs."""
    found: dict[str, tuple[Product, torch.Tensor]] = {"plain": (F.linear, weight)}
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    pointwise = torch.ops.mkldnn._linear_pointwise
    found["packed"] = (lambda x, packed: pointwise(x, packed, None, "none", [], ""), packed)
    if (library := native_library()) is not None:
        panels = PackedWeight(library, weight)
        found["panels"] = (lambda x, _plain: panels.product(x, None), weight)
        for name in names:
            codes = QuantisedPanels(library, quantised(weight.shape, name), weight.dtype)
            found[name] = (lambda x, _plain, codes=codes: codes.product(x, None), weight)
    return found


def best_seconds(products: dict[str, list[Callable[[], object]]], seconds: float) -> dict[str, float]:
    """The shortest call of each way; all ways together take about ``seconds``, and each call uses another weight.

    Ways that share a weight are half a round apart, so that a weight has left the caches before the next way reads it.
    """
    best = dict.fromkeys(products, float("inf"))
    until, turn = time.perf_counter() + seconds, 0
    while turn < 3 or time.perf_counter() < until:
        for number, (way, calls) in enumerate(products.items()):
            call = calls[(turn + number * len(calls) // 2) % len(calls)]
            started = time.perf_counter()
            call()
            best[way] = min(best[way], time.perf_counter() - started)
        turn += 1
    return best


def measure(
    shape: tuple[int, int], dtype: torch.dtype, args: argparse.Namespace, bandwidth: float
) -> list[dict[str, object]]:
    """A result for each number of rows."""
    out_size, in_size = shape
    num_bytes = out_size * in_size * dtype.itemsize
    num_copies = max(1, min(MAX_COPIES, -(-args.megabytes * 1_000_000 // num_bytes)))
    copies = [ways(torch.randn(shape).to(dtype), args.quantised) for _ in range(num_copies)]
    results: list[dict[str, object]] = []
    for rows in args.rows:
        x = torch.randn(rows, in_size).to(dtype)
        products: dict[str, list[Callable[[], object]]] = {
            way: [partial(product, x, weight) for product, weight in (copy[way] for copy in copies)]
            for way in copies[0]
        }
        best = best_seconds(products, args.seconds)
        result: dict[str, object] = {"out": out_size, "in": in_size, "dtype": str(dtype)[6:], "rows": rows}
        for way, taken in best.items():
            result[way + "_us"] = round(taken * 1e6, 1)
            result[way + "_gb_per_s"] = round(num_bytes / taken / 1e9, 1)
            result[way + "_share"] = round(num_bytes / taken / bandwidth, 2)
        print(*(f"{name} {value}" for name, value in result.items()), sep="  ", flush=True)
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per number of rows, all ways together")
    parser.add_argument("--megabytes", type=int, default=200, help="of copies of a weight; 0: one copy")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=[f"{out}x{size}" for out, size in SHAPES], help="OUTxIN")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--quantised", nargs="*", default=[], choices=QUANTISED)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bandwidth = read_bandwidth(1 << 28, repeats=20)
    print(f"{processor_name()}, {args.threads} threads: {bandwidth / 1e9:.1f} GB/s")
    results: list[dict[str, object]] = []
    with torch.inference_mode():
        for dtype in args.dtypes:
            for text in args.shapes:
                out_size, in_size = (int(size) for size in text.split("x"))
                results += measure((out_size, in_size), getattr(torch, dtype), args, bandwidth)
    facts = {"benchmark": "linear", "threads": args.threads, "gb_per_s": round(bandwidth / 1e9, 1)}
    print(json.dumps(facts | {"results": results}))


if __name__ == "__main__":
    main()
