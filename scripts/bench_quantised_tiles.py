#!/usr/bin/env python
"""Find the best tiles for products of few rows with quantised weights on this GPU.

    python scripts/bench_quantised_tiles.py                              the 8B shape, all formats, 2 to 256 rows
    python scripts/bench_quantised_tiles.py --weights mxfp4 --rows 16

Every candidate is timed for a weight with few outputs (down) and one with many (gate and up); the one in ``TILES``
(tp_engine/kernels/quantised/linear_triton.py) is marked.  "dequantise" makes the values for PyTorch's product: where it
is faster, FEW_ROWS (tp_engine/layers/formats/quantised_products.py) is too high.  Shares are those of the time of a
plain copy of as many bytes.  Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from bench_attention_sizes import report
from bench_kernels import SHAPES, number_of_sets, seconds_per_launch
from benchmarks.kernels.quantised import FORMATS, make_weight
from benchmarks.machine import copy_bandwidth, processor_name

BLOCK_N, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (3, 4, 5)
"""Candidates.  Rows of a tile follow from the rows of ``x``, columns from the weight's groups."""


def rows_of(weights: str, sizes: tuple[int, int], num_rows: int, bandwidth: float) -> Iterator[dict[str, object]]:
    """One row per candidate, the current tiles first, the product with dequantised weights last."""
    from tp_engine.kernels.quantised.dequantise_triton import multiply_dequantised
    from tp_engine.kernels.quantised.linear_triton import TILES, RowTiles, quantised_linear_triton

    num_bytes = make_weight(weights, sizes, "meta").num_bytes
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [make_weight(weights, sizes, "cuda") for _ in range(number_of_sets(num_bytes, cache))]
    x = torch.randn(num_rows, sizes[1], device="cuda", dtype=torch.bfloat16)
    current = next(tiles for most, tiles in TILES if num_rows <= most)
    further = [
        RowTiles(current.block_m, block_n, block_n, warps, stages)
        for block_n, warps, stages in itertools.product(BLOCK_N, WARPS, STAGES)
    ]
    for tiles in [current, *further]:
        launches = [partial(quantised_linear_triton, x, one, None, None, tiles) for one in sets]
        yield _timed(str(tuple(tiles)), launches, num_bytes / bandwidth) | {"is_current": tiles == current}
    plain = [partial(multiply_dequantised, x, one, None) for one in sets]
    yield _timed("dequantise", plain, num_bytes / bandwidth) | {"is_current": False}


def _timed(name: str, launches: Sequence[Callable[[], object]], least: float) -> dict[str, object]:
    try:
        seconds = seconds_per_launch(launches, 10)
    except Exception as error:  # for example, too much shared memory
        return {"sizes": name, "error": f"{type(error).__name__}: {error}"}
    return {"sizes": name, "us": round(seconds * 1e6, 2), "share": round(least / seconds, 3)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="the layer's shape (default: %(default)s)")
    parser.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 16, 32, 64, 128, 256], help="rows of a step")
    parser.add_argument("--best", type=int, default=3, help="candidates to print beside the current one")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_quantised_tiles times CUDA kernels, and torch finds no CUDA GPU", file=sys.stderr)
        return 2
    bandwidth, shape = copy_bandwidth(), SHAPES[args.shape]
    print(f"{processor_name()}, {shape.name}: copies at {bandwidth / 1e9:,.0f} GB/s")
    found = [
        row
        for weights, num_rows in itertools.product(args.weights, args.rows)
        for name, sizes in {"down": (shape.hidden, shape.inner), "gate, up": (2 * shape.inner, shape.hidden)}.items()
        for row in report(
            f"{weights}, {name}, {num_rows} rows", rows_of(weights, sizes, num_rows, bandwidth), args.best
        )
    ]
    facts = {"benchmark": "quantised_tiles", "device": processor_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
