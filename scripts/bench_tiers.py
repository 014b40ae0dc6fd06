#!/usr/bin/env python
"""Compare an engine that has a host tier with one that computes again what its cache has lost.

    python scripts/bench_tiers.py --plot tiers.svg                  everything, shape B in bfloat16
    python scripts/bench_tiers.py --sections reload --tokens 1024

reload: the time to the first token of a prompt that comes back from the host, beside that of a new one, and the time of
one block.  chats: multi-turn chats four times the pool, beside no tier and beside one pool of the summed size.  fits:
chats that the pool holds.  sharers: requests that share an evicted prefix.  In these three, engines take turns, and
medians count.  restart: prompts that an engine before this one has had, read from disk, beside computing them.  The
last line is one JSON object.
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
from benchmarks.section_options import parse_sections, section_parser
from benchmarks.shapes import make_folder
from benchmarks.tiers.chats import TIMES_POOL, ChatSet, compare_chats, compare_fits
from benchmarks.tiers.engines import EngineMaker
from benchmarks.tiers.plot import svg
from benchmarks.tiers.reload import compare_reload, engine_options
from benchmarks.tiers.restart import compare_restart, disk_options
from benchmarks.tiers.sharers import Sharers, compare_sharers

SECTIONS = ("reload", "chats", "fits", "sharers", "restart")
_COUNTS = ("host_pools", "requests", "prefix_blocks", "shrink")


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen sections and print them."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    report: dict[str, Any] = {
        "benchmark": "tiers",
        "machine": processor_name(),
        "shape": args.model or args.shape,
        "dtype": args.dtype,
        "block_size": args.block_size,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_folder(Path(folder), args.shape, args.dtype))
        if "reload" in args.sections:
            report["reload"] = measure_reload(args, model)
        report |= measure_runs(args, model)
        if "restart" in args.sections:
            report["restart"] = measure_restart(args, model, Path(args.kv_disk_path or folder) / "kv")
    print_tables(report)
    if args.plot is not None:
        args.plot.write_text(svg(report), encoding="utf-8")
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = section_parser(__doc__, SECTIONS, shape="B", dtype="bfloat16")
    parser.add_argument("--tokens", type=int, default=1537, help="reload, restart: tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=10, help="reload, restart: rounds; the median counts")
    parser.add_argument("--kv-offloading-size", type=float, default=1.0, help="reload, restart: GiB of a tier")
    parser.add_argument("--kv-disk-path", help="restart: directory on the disk (default: one for temporary files)")
    parser.add_argument("--runs", type=int, default=3, help="other sections: runs per engine; the median counts")
    parser.add_argument("--chats", type=int, default=16, help="chats, fits: number of chats")
    parser.add_argument("--host-pools", type=int, default=4, help="chats: size of the host tier, in pools")
    parser.add_argument("--requests", type=int, default=50, help="sharers: number of requests")
    parser.add_argument("--prefix-blocks", type=int, default=64, help="sharers: blocks of the prefix")
    parser.add_argument("--shrink", type=int, default=1, help="chats, fits: divide lengths of messages by this")
    positive = ("block_size", "rounds", "kv_offloading_size", "runs", *_COUNTS)
    args = parse_sections(parser, arguments, SECTIONS, positive)
    if args.chats < 2 * TIMES_POOL:
        parser.error(f"--chats is {args.chats}; the pool holds 1 of {TIMES_POOL} chats: at least {2 * TIMES_POOL}")
    if args.tokens <= args.block_size:
        parser.error(f"--tokens is {args.tokens}; a prompt must be longer than a block: at least {args.block_size + 1}")
    return args


def measure_reload(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The section ``reload``."""
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    options = engine_options(args.tokens, args.block_size, args.kv_offloading_size)
    engine = TpEngine(model, {"dtype": args.dtype, **options, **args.engine_options})
    try:
        return compare_reload(
            engine, vocab_size=vocab_size, num_tokens=args.tokens, block_size=args.block_size, rounds=args.rounds
        )
    finally:
        engine.close()


def measure_restart(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """The section ``restart``."""
    vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    options = disk_options(folder, args.tokens, args.block_size, args.kv_offloading_size)
    return compare_restart(
        lambda: TpEngine(model, {"dtype": args.dtype, **options, **args.engine_options}), folder,
        vocab_size=vocab_size, num_tokens=args.tokens, block_size=args.block_size, rounds=args.rounds,
    )  # fmt: skip


def measure_runs(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The sections whose engines take turns."""
    maker = EngineMaker(model, {"dtype": args.dtype, "block_size": args.block_size, **args.engine_options})
    chats = ChatSet(num_chats=args.chats).shrunk(args.shrink)
    sharers = Sharers(num_requests=args.requests, prefix_blocks=args.prefix_blocks, block_size=args.block_size)
    found: dict[str, Any] = {}
    if "chats" in args.sections:
        found["chats"] = compare_chats(maker, chats, args.runs, args.host_pools)
    if "fits" in args.sections:
        found["fits"] = compare_fits(maker, chats, args.runs)
    if "sharers" in args.sections:
        found["sharers"] = compare_sharers(maker, sharers, args.runs)
    return found


def print_tables(report: dict[str, Any]) -> None:
    """Print the figures beside their goals."""
    print(f"\n{report['machine']}, {report['threads']} threads; {report['shape']}, {report['dtype']}")
    if found := report.get("reload"):
        print(
            f"first token of {found['tokens']} tokens: computed {found['first_token_computed_ms']:.1f} ms, reloaded "
            f"{found['first_token_reloaded_ms']:.1f} ms: {found['first_token_ratio']:.1f}x"
        )
        print(
            f"a block of {found['block_bytes']:,} bytes: computed {found['block_computed_us']:.0f} us, reloaded "
            f"{found['block_reloaded_us']:.1f} us: {found['block_ratio']:.1f}x (goal {found['goal']:g}x)"
        )
    for name in ("chats", "fits", "sharers"):
        if found := report.get(name):
            print(
                f"{name:<8} {found['on_tokens_per_s']:,.1f} tokens/s with a tier, {found['off_tokens_per_s']:,.1f} "
                f"without: {found['ratio']:.2f}x (goal {found['goal']:g}x); pool of {found['pool_blocks']:,} blocks, "
                f"{found['host_blocks']:,} on the host; {found['same_answers']:.1%} of the answers the same"
            )
    if found := report.get("chats"):
        on, off, one_pool = (found[f"{name}_hit_percent"] for name in ("on", "off", "one_pool"))
        print(
            f"  hit rate {on:.2f} % with a tier, {off:.2f} % without, {one_pool:.2f} % with one pool "
            f"of the summed size ({found['one_pool_tokens_per_s']:,.1f} tokens/s): "
            f"{found['hit_gap_points']:.2f} points apart (goal {found['goal_points']:g})"
        )
    if found := report.get("fits"):
        print(f"  {found['moved_bytes']:,} bytes moved (goal {found['goal_bytes']})")
    if found := report.get("sharers"):
        print(
            f"  {found['loaded_blocks']} blocks loaded for {found['requests']} requests with a prefix of "
            f"{found['prefix_blocks']}: {found['loads_per_block']:g}x (goal {found['goal_loads']:g}x)"
        )
    if found := report.get("restart"):
        print(
            f"restart: first token of {found['tokens']} tokens: computed {found['first_token_computed_ms']:.1f} ms, "
            f"read from disk ({found['disk_gb_per_s']:.2f} GB/s) {found['first_token_read_ms']:.1f} ms: "
            f"{found['ratio']:.1f}x (goal {found['goal']:g}x)"
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
