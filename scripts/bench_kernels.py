#!/usr/bin/env python
"""Time every kernel on this GPU against the bandwidth of a plain copy in the same run.  Ends with one JSON line.

    python scripts/bench_kernels.py --shape qwen3-8b
    python scripts/bench_kernels.py --tiles quantised --weights "int4, group 128" mxfp4 --batch 16,64,256
    python scripts/bench_kernels.py --tiles experts --experts gpt-oss-20b --weights mxfp4 --batch 1,32,2048

--tiles times all candidates for the tables of tiles in tp_engine/kernels, with the current one first; shares are of the
least time: that of a copy of as many bytes, or of a large product of as many operations.

Each kernel is launched from a CUDA graph, so the host does not distort its time, on several sets of tensors in turn,
which together exceed the L2 cache, so the cache does not either.  For rows marked "warm", the sets are so small that
all fit into the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.kernels.cases import KernelCase, Launch, Shape, decode_input_cases, token_cases
from benchmarks.kernels.tiles import EXPERTS, WEIGHTS, TileCase, expert_tiles, quantised_tiles

from tp_engine.apps.bench.machine import copy_bandwidth, matmul_rate, processor_name, seconds_on_gpu

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="qwen3-0.6b", hidden=1024, inner=3072, num_heads=16, num_kv_heads=8, head_dim=128),
        Shape(name="qwen3-8b", hidden=4096, inner=12288, num_heads=32, num_kv_heads=8, head_dim=128),
        Shape(name="qwen3-32b", hidden=5120, inner=25600, num_heads=64, num_kv_heads=8, head_dim=128),
    )
}
VOCAB_SIZE = 151936
MAX_SETS = 128
MIN_LAUNCHES = 20
MAX_REPEATS = 500  # rows advance at every launch and must stay within their tables


@dataclass(frozen=True)
class Ceilings:
    """This GPU's rates in this run: bytes per second of a copy (read plus written), operations per second of a large
    matrix product."""

    copy: float
    matmul: float


def number_of_sets(num_bytes: int, l2_bytes: int) -> int:
    """The number of sets of tensors: together four times the L2 cache, ``MAX_SETS`` at most."""
    return min(MAX_SETS, max(1, -(-4 * l2_bytes // num_bytes)))


def row_of(case: KernelCase, seconds: float, ceilings: Ceilings, *, num_sets: int, l2_bytes: int) -> dict[str, object]:
    """The figures of one kernel."""
    row = {
        "kernel": case.kernel,
        "size": case.size,
        "bytes": case.num_bytes,
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(case.num_bytes / seconds / 1e9, 1),
        "share_of_copy": round(case.num_bytes / seconds / ceilings.copy, 3),
        "warm": case.num_bytes * num_sets < 2 * l2_bytes,
    }
    if case.num_flops:
        row |= {
            "tflop_per_s": round(case.num_flops / seconds / 1e12, 1),
            "share_of_matmul": round(case.num_flops / seconds / ceilings.matmul, 3),
        }
    return row


def seconds_per_launch(launches: Sequence[Launch], repeats: int) -> float:
    """The median over ``repeats`` replays of one graph that holds every launch, at least ``MIN_LAUNCHES`` in all."""
    rounds = -(-MIN_LAUNCHES // len(launches))
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    samples = [seconds_on_gpu(graph.replay) / (rounds * len(launches)) for _ in range(repeats + 2)]
    return statistics.median(samples[2:])


def all_cases(shape: Shape, args: argparse.Namespace) -> Iterator[KernelCase]:
    """Every kernel at every size asked for."""
    from benchmarks.kernels.attention import attention_cases, latent_cases, prefill_cases, sparse_cases
    from benchmarks.kernels.quantised import quantised_cases
    from benchmarks.kernels.sampling import sampling_cases

    for num_tokens in (*args.batch, *args.prefill):
        yield from token_cases(shape, num_tokens)
        yield from quantised_cases(shape, num_tokens)
    for num_requests in args.batch:
        for length in args.length:
            yield from attention_cases(shape, num_requests, length)
            yield from latent_cases(shape, num_requests, length)
            yield from sparse_cases(shape, num_requests, length)
            yield from decode_input_cases(shape, num_requests, length)
        yield from sampling_cases(shape, num_requests, VOCAB_SIZE)
    for num_tokens in args.prefill:
        yield from prefill_cases(shape, num_tokens)


def measure(case: KernelCase, ceilings: Ceilings, repeats: int) -> dict[str, object]:
    """One row of the table, or the error instead."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    num_sets = number_of_sets(case.num_bytes, l2_bytes)
    try:
        launches = [case.make() for _ in range(num_sets)]
        first_s = _seconds_of_first(launches[0])
        seconds = seconds_per_launch(launches, repeats)
    except Exception as error:  # the other kernels are measured all the same
        return {"kernel": case.kernel, "size": case.size, "error": f"{type(error).__name__}: {error}"}
    row = row_of(case, seconds, ceilings, num_sets=num_sets, l2_bytes=l2_bytes)
    return row | {"first_ms": round(first_s * 1e3, 1)}


def _seconds_of_first(launch: Launch) -> float:
    """The seconds of the first launch, in which Triton compiles or loads the kernel, and cuDNN makes a plan."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def tile_cases(shape: Shape, args: argparse.Namespace) -> Iterator[TileCase]:
    """Every kernel with tiles at every size asked for."""
    for weights in args.weights:
        for num_rows in args.batch:
            if args.tiles == "experts":
                for name in args.experts:
                    yield from expert_tiles(name, EXPERTS[name], weights, num_rows, shape.device)
            elif weights != "none":
                yield from quantised_tiles(shape, weights, num_rows)


def measure_tiles(case: TileCase, ceilings: Ceilings, repeats: int) -> Iterator[dict[str, object]]:
    """One row per candidate, the current tiles first, other implementations last."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [case.make() for _ in range(number_of_sets(case.num_bytes, cache))]
    least_s = max(case.num_bytes / ceilings.copy, case.num_flops / ceilings.matmul)
    ways: dict[str, Callable[[Any], Launch]] = {
        str(tuple(tiles)): lambda one, tiles=tiles: case.launch(one, tiles)  # type: ignore[misc]
        for tiles in (case.current, *case.candidates)
    }
    for name, launch in (ways | case.others).items():
        row: dict[str, object] = {"case": case.name, "tiles": name, "is_current": name == str(tuple(case.current))}
        try:
            seconds = seconds_per_launch([launch(one) for one in sets], repeats)
        except Exception as error:  # for example, too much shared memory
            yield row | {"error": f"{type(error).__name__}: {error}"}
            continue
        yield row | {"us": round(seconds * 1e6, 2), "share": round(least_s / seconds, 3)}


def print_tiles(rows: Sequence[dict[str, Any]]) -> None:
    """The current tiles, then the three fastest."""
    timed = sorted((row for row in rows if "us" in row), key=lambda row: float(row["us"]))
    print(f"{rows[0]['case']}: {len(timed)} of {len(rows)} candidates ran")
    for row in [*(row for row in rows if row["is_current"]), *timed[:3]]:
        told = row.get("error") or f"{row['us']:>10} us  {row['share']:6.1%}"
        print(f"  {'current' if row['is_current'] else '':8} {told}  {row['tiles']}", flush=True)


def print_row(row: dict[str, object]) -> None:
    """One line of the table."""
    if "error" in row:
        print(f"{row['kernel']:32} {row['size']:>16}  failed: {row['error']}", flush=True)
        return
    moved, rate = f"{row['bytes']:>14,} B {row['us']:>10.2f} us", f"{row['gb_per_s']:>9.1f} GB/s"
    share = f"{row['share_of_copy']:>7.1%}{'  warm' if row['warm'] else ''}"
    if "tflop_per_s" in row:
        share += f"  {row['tflop_per_s']} TFLOP/s, {row['share_of_matmul']:.1%} of a matrix product's"
    print(f"{row['kernel']:32} {row['size']:>16} {moved} {rate} {share}  first {row['first_ms']} ms", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="the layer's shape (default: %(default)s)")
    parser.add_argument("--batch", type=_sizes, default=(1, 64, 256), help="requests per decode step, as in 1,64,256")
    parser.add_argument("--prefill", type=_sizes, default=(8192,), help="tokens of prefill steps, as in 2048,8192")
    parser.add_argument("--length", type=_sizes, default=(1024,), help="tokens of each decoding request")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--tiles", choices=("quantised", "experts"), help="time candidates for this table of tiles")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="for --tiles: formats")
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS), help="for --tiles: layers")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph (default: %(default)s)")
    args = parser.parse_args(arguments)
    if not 1 <= args.repeats <= MAX_REPEATS:
        parser.error(f"--repeats is {args.repeats}; it goes from 1 to {MAX_REPEATS}")
    return args


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text} contains a size below 1")
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status: 2 without a GPU, 1 if a kernel failed."""
    args = parse(arguments)
    if not torch.cuda.is_available():
        print("bench_kernels times CUDA kernels, and torch finds no CUDA GPU; run it on a GPU host", file=sys.stderr)
        return 2
    shape = SHAPES[args.shape]
    ceilings = Ceilings(copy_bandwidth(), matmul_rate(shape.dtype))
    rates = f"copies at {ceilings.copy / 1e9:,.0f} GB/s, matrix products at {ceilings.matmul / 1e12:,.0f} TFLOP/s"
    print(f"{processor_name()}, torch {torch.__version__}, shape {shape.name}: {rates}")
    rows: list[dict[str, object]] = []
    for tiled in tile_cases(shape, args) if args.tiles else ():
        found = list(measure_tiles(tiled, ceilings, args.repeats))
        print_tiles(found)
        rows += found
    for case in () if args.tiles else all_cases(shape, args):
        if args.only in case.kernel:
            rows.append(measure(case, ceilings, args.repeats))
            print_row(rows[-1])
            torch.cuda.empty_cache()
    facts: dict[str, object] = {
        "benchmark": "tiles" if args.tiles else "kernels",
        "device": processor_name(),
        "torch": torch.__version__,
        "shape": shape.name,
    }
    facts |= {"copy_gb_per_s": round(ceilings.copy / 1e9, 1), "matmul_tflop_per_s": round(ceilings.matmul / 1e12, 1)}
    print(json.dumps(facts | {"results": rows}))
    return int(not args.tiles and any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
