"""The command line of the offline benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tp_engine.apps.bench.gate import add_gate_options
from tp_engine.apps.bench.int4_checkpoint import PACKINGS
from tp_engine.apps.bench.offline.process import DUMMY_PEERS, PACKAGES, PEERS, parse_pythons
from tp_engine.apps.bench.plot import plot_file
from tp_engine.apps.bench.shapes import DUMMY_SHAPES, SHAPES
from tp_engine.apps.bench.workloads import LARGE_WORKLOADS, SMALL_WORKLOADS, WORKLOADS
from tp_engine.config import QUANTIZATIONS

DTYPES = ("float32", "bfloat16")
WEIGHTS = ("none", *QUANTIZATIONS, *PACKINGS)
"""The weights of tp_engine: as they are, quantised while loading, or from a checkpoint in this packing."""


def parse_arguments(arguments: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the shape filled in; ``cells`` are the (shape, dtype) pairs to run."""
    parser = argparse.ArgumentParser(
        "tp-engine bench offline", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*sorted(SHAPES), *DUMMY_SHAPES], default="C", help="a model of this shape")
    parser.add_argument("--cells", help="several shapes in one run: A:bfloat16,B:bfloat16,B:float32,C:float32")
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32; bfloat16 for Qwen3 shapes")
    parser.add_argument("--workloads", help="comma-separated: " + ", ".join(WORKLOADS))
    parser.add_argument("--tensor-parallel-size", default="1", help="one size, or several: 1,2,4")
    parser.add_argument("--tp-invariant", default="off", help="off, on, or off,on")
    parser.add_argument("--mtp", default="0", help="draft tokens of the model's own head (Q-mtp, B-mtp), such as 0,3")
    weights = f"weights of tp_engine: {', '.join(WEIGHTS)}; several side by side: none,{QUANTIZATIONS[0]}"
    parser.add_argument("--quantization", default="none", help=weights)
    parser.add_argument("--device-ids", help="device of each rank, such as 0,0: several ranks on one GPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per engine; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="torch threads per rank (default: torch's choice)")
    parser.add_argument("--engine-options", type=json.loads, default={}, help='more for LLM: {"enforce_eager": true}')
    steps = parser.add_argument_group("steps of tp_engine, instead of workloads")
    steps.add_argument("--steps", type=_sizes, metavar="ROWSxTOKENS", help="requests that decode, tokens of a prompt")
    steps.add_argument("--num-steps", type=int, default=64, help="steps that are timed, and steps that are profiled")
    sizes = 'values of --cudagraph-prefill-capture-sizes side by side, such as "none;auto"'
    steps.add_argument("--prefill-graphs", default="none", metavar="SIZES", help=sizes)
    _add_peer_options(parser)
    add_gate_options(parser)
    args = parser.parse_args(arguments)
    args.is_dummy = args.model is None and args.shape in DUMMY_SHAPES
    args.dtype = args.dtype or ("bfloat16" if args.is_dummy else "float32")
    args.cells = _cells(parser, args)
    args.workloads = args.workloads or ",".join(LARGE_WORKLOADS if args.is_dummy else SMALL_WORKLOADS)
    if unknown := set(args.workloads.split(",")) - set(WORKLOADS):
        parser.error(f"--workloads names {', '.join(sorted(unknown))}; choose among {', '.join(WORKLOADS)}")
    if unknown := set(args.quantization.split(",")) - set(WEIGHTS):
        parser.error(f"--quantization names {', '.join(sorted(unknown))}; choose among {', '.join(WEIGHTS)}")
    if args.is_dummy and (packed := set(args.quantization.split(",")) & set(PACKINGS)):
        parser.error(f"--shape {args.shape} has no weights to write as {', '.join(sorted(packed))}; choose A, B or C")
    _check_peers(parser, args)
    return args


def _add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="extend",
        nargs="+",
        choices=PEERS,
        metavar="PEER[:WEIGHTS]",
        help=f"default: transformers; of {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"interpreter that has a peer ({', '.join(PACKAGES)}); default: this one",
    )
    parser.add_argument("--peer-options", type=json.loads, default={}, help='by peer: {"vllm": {"seed": 1}}')
    parser.add_argument("--peer-timeout-s", type=float, default=1200.0, help="longest that a peer may take to answer")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw all engines side by side: .svg, .png")
    parser.add_argument("--no-peer", action="store_true", help="measure tp_engine alone")
    parser.add_argument("--nano-vllm-path", type=Path, help="also measure the nano-vllm in this folder (GPU only)")
    parser.add_argument(
        "--together",
        action="store_true",
        help="on a GPU: load all engines at once, with equal shares of its memory (transformers takes what it needs), "
        "and let them take turns; default: one engine after the other.  On CPUs they take turns with and without it",
    )


def _cells(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.cells is None:
        return [(args.shape, args.dtype)]
    if args.model is not None or args.is_dummy:
        parser.error("--cells names shapes of its own; leave out --model and --shape")
    cells = []
    for cell in args.cells.split(","):
        shape, _, dtype = cell.partition(":")
        if shape not in SHAPES or dtype not in DTYPES:
            parser.error(f"--cells names {cell}; write SHAPE:DTYPE, of {', '.join(SHAPES)} and {', '.join(DTYPES)}")
        cells.append((shape, dtype))
    return cells


def _sizes(text: str) -> tuple[int, int]:
    rows, _, tokens = text.partition("x")
    if not (rows.isdigit() and tokens.isdigit() and int(rows) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text} is not ROWSxTOKENS, such as 256x512")
    return int(rows), int(tokens)


def _check_peers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.no_peer and args.peer:
        parser.error("--no-peer and --peer exclude each other; give one of them")
    if args.record or args.against:  # a gate is this engine's
        if args.peer or args.nano_vllm_path or args.plot or args.steps:
            parser.error("--record and --against measure tp_engine alone; leave --peer, --plot and --steps out")
        args.no_peer = True
    args.peer = [] if args.no_peer else list(dict.fromkeys(args.peer or ["transformers"]))
    args.peer_folders = {"nano-vllm": args.nano_vllm_path} if args.nano_vllm_path else {}
    args.peer = list(dict.fromkeys([*args.peer, *args.peer_folders]))
    if args.is_dummy and (unable := [name for name in args.peer if name not in DUMMY_PEERS]):
        parser.error(f"--shape {args.shape} has no weights to load for {', '.join(unable)}; choose A, B or C")
    try:
        args.peer_python = parse_pythons(args.peer_python)
    except ValueError as error:
        parser.error(f"--peer-python: {error}")
    if args.nano_vllm_path and not (args.nano_vllm_path / "nanovllm").is_dir():
        parser.error(f"--nano-vllm-path is {args.nano_vllm_path}; it must be the folder that holds nanovllm/")
