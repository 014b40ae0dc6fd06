"""Compare paged with contiguous allocation of the KV cache, and decoding with and without a cache.

    python scripts/bench_paging.py                                  everything, shape C in float32
    python scripts/bench_paging.py --sections memory                shares of the pool alone: exact, needs no model
    python scripts/bench_paging.py --shape B --dtype bfloat16 --rounds 5 --plot paging.svg

memory: the share of the pool that holds tokens, from this project's scheduler over four traces; a contiguous
reservation is as long as the longest request.  throughput: one engine, one pool, requests at once; contiguous
allocation admits one request per reservation.  cache: seconds per generated token; --stride 1 measures every token
without a cache.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import processor_name
from benchmarks.offline.engines import TpEngine
from benchmarks.paging.decoding import PROMPT_TOKENS, compare_decoding
from benchmarks.paging.memory import compare_memory
from benchmarks.paging.plot import svg
from benchmarks.paging.throughput import compare_throughput, make_engines
from benchmarks.section_options import parse_sections, section_parser
from benchmarks.shapes import make_folder

SECTIONS = ("memory", "throughput", "cache")


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen sections and print them."""
    args = parse_arguments(arguments)
    report: dict[str, Any] = {"benchmark": "paging", "machine": processor_name(), "block_size": args.block_size}
    if "memory" in args.sections:
        report["memory"] = compare_memory(args.block_size)
    if set(args.sections) - {"memory"}:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        report |= {"dtype": args.dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}
        report |= {"shape": args.model or args.shape, "rounds": args.rounds}
        with tempfile.TemporaryDirectory() as folder:
            measure(args, args.model or str(make_folder(Path(folder), args.shape, args.dtype)), report)
    print_tables(report)
    if args.plot is not None:
        args.plot.write_text(svg(report), encoding="utf-8")
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = section_parser(__doc__, SECTIONS, shape="C", dtype="float32")
    parser.add_argument("--requests", default="1,4,8,16", help="throughput: requests at once")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of a contiguous reservation")
    parser.add_argument("--reservations", type=int, default=3, help="how many of them the pool holds")
    parser.add_argument("--shrink", type=int, default=1, help="throughput: divide all lengths by this")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per engine; the median counts")
    parser.add_argument("--tokens", type=int, default=2000, help="cache: tokens to generate")
    parser.add_argument("--stride", type=int, default=50, help="cache: every so many tokens without a cache")
    positive = ("block_size", "reservations", "shrink", "rounds", "tokens", "stride")
    args = parse_sections(parser, arguments, SECTIONS, positive)
    if "throughput" in args.sections and args.max_model_len % args.block_size:
        parser.error(f"--max-model-len is {args.max_model_len}; it must be a multiple of --block-size")
    return args


def measure(args: argparse.Namespace, model: str, report: dict[str, Any]) -> None:
    """The sections that need a model."""
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    options = {"dtype": args.dtype, "block_size": args.block_size, **args.engine_options}
    if "throughput" in args.sections:
        engines = make_engines(model, options, max_len=args.max_model_len, num_reservations=args.reservations)
        counts = [int(count) for count in args.requests.split(",")]
        try:
            report["throughput"] = compare_throughput(
                engines, counts, vocab_size=vocab_size, rounds=args.rounds, shrink=args.shrink
            )
        finally:
            for engine in engines.values():
                engine.close()
        report |= {"reservation_tokens": args.max_model_len, "reservations": args.reservations}
    if "cache" in args.sections:
        longest = PROMPT_TOKENS + args.tokens + 1
        options |= {"max_model_len": longest, "num_gpu_blocks_override": -(-longest // args.block_size) + 1}
        options |= {"enable_prefix_caching": False, "max_num_batched_tokens": max(longest, 256)}
        engine = TpEngine(model, options)
        try:
            report["kv_cache"] = compare_decoding(
                engine, vocab_size=vocab_size, num_tokens=args.tokens, stride=args.stride
            )
        finally:
            engine.close()


def print_tables(report: dict[str, Any]) -> None:
    """Print the figures beside their goals."""
    print(f"\n{report['machine']}; blocks of {report['block_size']} tokens")
    for row in report.get("memory", ()):
        print(
            f"{row['trace']:<14} paged {row['paged']:.1%} of the pool (goal {row['goal']:.0%}, "
            f"{row['running_paged']:g} requests), contiguous {row['contiguous']:.1%} ({row['running_contiguous']:g})"
        )
    for row in report.get("throughput", ()):
        goal = "" if row["goal"] is None else f" (goal {row['goal']:.2f}x)"
        print(
            f"{row['requests']:>3} requests   paged {row['paged']:,.1f} tokens/s, contiguous {row['contiguous']:,.1f}: "
            f"{row['ratio']:.2f}x{goal}"
        )
    if found := report.get("kv_cache"):
        seconds = f"{found['with_cache_s']:.2f} s with a KV cache, {found['without_cache_s']:.2f} s without"
        equal = f"{found['equal_tokens']:.0%} of the tokens equal"
        print(f"{found['tokens']} tokens: {seconds}: {found['ratio']:.1f}x (goal {found['goal']}x); {equal}")
    print()


if __name__ == "__main__":
    sys.exit(main())
