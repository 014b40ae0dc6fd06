"""Options of the scripts whose measurements are sections of one report, with one model (bench_paging, bench_tiers)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shapes import SHAPES


def section_parser(text: str | None, sections: Sequence[str], *, shape: str, dtype: str) -> argparse.ArgumentParser:
    """A parser with the common options; ``shape`` and ``dtype`` are the model's by default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(sections), help="comma-separated (default: all)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape, help="a model of this shape, random weights")
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype)
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's choice)")
    parser.add_argument("--plot", type=Path, help="also draw a picture (SVG) into this file")
    parser.add_argument("--engine-options", type=json.loads, default={}, help='more for LLM: {"load_format": "dummy"}')
    return parser


def parse_sections(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, sections: Sequence[str], positive: Sequence[str]
) -> argparse.Namespace:
    """The options, ``sections`` as a list; ends the program if one is unknown, or a ``positive`` option is not."""
    args = parser.parse_args(arguments)
    args.sections = args.sections.split(",")
    if unknown := set(args.sections) - set(sections):
        parser.error(f"--sections names {', '.join(sorted(unknown))}; choose among {', '.join(sections)}")
    for name in positive:
        value = getattr(args, name)
        if value <= 0:
            rule = "at least 1" if isinstance(value, int) else "above 0"
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be {rule}")
    return args
