#!/usr/bin/env python
"""Compare the codecs of the host tier: bytes of a block, the error of K/V, and that of log-probabilities.

    python scripts/bench_codecs.py                                     the demo model and shape B, all codecs
    python scripts/bench_codecs.py --models B --codecs int8,pca:48

K/V are those of transformers' model in bfloat16; a basis is calibrated on other prompts than it is measured on.  The
error of log-probabilities is that of an engine whose prompt comes back from the host (pca with a bound of 0.99, so that
nothing is refused).  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.codecs.answers import compare, engine_options, log_probabilities
from benchmarks.codecs.states import blocks_of, measure_states
from benchmarks.codecs.texts import DemoChats, RandomTexts, Texts
from benchmarks.machine import processor_name
from benchmarks.shapes import DEMO_MODEL, make_folder

from tp_engine.kv_codec import pca_settings
from tp_engine.model_config import load_model_config
from tp_engine.units import ceil_div
from tp_engine.worker.codecs.pca import TOKENS_PER_DIM

_NO_BOUND = 0.99


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen codecs on the chosen models and print a table for each."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    report: dict[str, Any] = {"benchmark": "codecs", "machine": processor_name(), "models": {}}
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = str(DEMO_MODEL if name == "demo" else make_folder(Path(folder), name, args.dtype))
            texts = (DemoChats if name == "demo" else RandomTexts)(model, args.tokens)
            rows = report["models"][name] = measure(args, model, texts)
        print_table(name, args.dtype, rows)
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,B", help="demo, or shapes with random weights (default: %(default)s)")
    parser.add_argument("--codecs", help="comma-separated (default: int8, fp8, and pca of eighths of head_dim)")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=6, help="whose K/V are measured")
    parser.add_argument("--endings", type=int, default=24, help="places whose log-probabilities are measured")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's choice)")
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, model: str, texts: Texts) -> dict[str, dict[str, Any]]:
    """Each codec's figures."""
    spec, _ = load_model_config(model)
    head_dim = spec.kv_layout.groups[0].head_dim
    codecs = args.codecs.split(",") if args.codecs else default_codecs(head_dim)
    num_calibration = ceil_div(TOKENS_PER_DIM * head_dim, args.block_size)
    num_first = ceil_div(num_calibration, args.tokens // args.block_size - 1) + 1
    prompts = [texts.prompt(100 + number) for number in range(num_first + args.prompts)]
    blocks = blocks_of(model, args.dtype, prompts, args.block_size)
    options = {"dtype": args.dtype, **engine_options(args.tokens, args.block_size, spec.vocab_size)}

    def asked(codec: str) -> torch.Tensor:
        wanted = num_calibration if pca_settings(codec) else 0
        return log_probabilities(model, options, texts, codec=codec, num_calibration=wanted, num_endings=args.endings)

    exact, rows = asked("none"), dict[str, dict[str, Any]]()
    for codec in codecs:
        free = f"{codec}:{_NO_BOUND}" if pca_settings(codec) else codec
        rows[codec] = measure_states(free, blocks, num_calibration) | compare(asked(free), exact)
        print(codec, rows[codec], file=sys.stderr, flush=True)
    return rows


def default_codecs(head_dim: int) -> list[str]:
    """Both of 8 bits, and seven ranks."""
    return ["int8", "fp8", *(f"pca:{head_dim * eighths // 8}" for eighths in (8, 7, 6, 5, 4, 3, 2, 1))]


def print_table(name: str, dtype: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print it as Markdown."""
    print(f"\n{name}, {dtype}\n")
    print("| codec | bytes | blocks | K | V | worst | refused at 0.25, 0.5 | likeliest | any token | KL | same |")
    print("| --- |" + " --- |" * 10)
    for codec, row in rows.items():
        print(
            f"| `{codec}` | {row['blob_bytes']:,} | {row['times']:.2f}x | {row['key_error']:.2%} | "
            f"{row['value_error']:.2%} | {row['largest_error']:.2%} | {row['refused_at_0.25']:.0%}, "
            f"{row['refused_at_0.5']:.0%} | {row['likeliest_error']:.3f} | {row['largest_logprob_error']:.3f} | "
            f"{row['mean_divergence']:.2g} | {row['same_answers']:.0%} |"
        )


if __name__ == "__main__":
    sys.exit(main())
