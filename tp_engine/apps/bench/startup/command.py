"""Start-up benchmark: time tp_engine and vLLM from the start of a process to the first token, in one run.

    tp-engine bench startup --rounds 5 --threads 2 --peer-python vllm=~/vllm/bin/python
    tp-engine bench startup --cells C:float32 --contenders llm,server --no-peer

Every start is a fresh process; the contenders alternate.  ``llm`` is a script that makes an ``LLM`` and generates one
token.  ``server`` is ``tp-engine serve`` until it answers ``/health``, then one completion.  vLLM runs like ``llm``.
All load the same checkpoint, with a tokenizer.  The first round does not count: it fills the page cache and compiles
kernels.  For each cell it prints the medians of the phases and of the whole, and vLLM's total over ours.  The last line
is one JSON object.  A peer that is not found is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tp_engine.apps.bench.machine import processor_name
from tp_engine.apps.bench.offline.options import parse_arguments as check_cells
from tp_engine.apps.bench.offline.process import Found, find_peer, parse_pythons
from tp_engine.apps.bench.shapes import add_tokenizer, make_checkpoint
from tp_engine.apps.bench.startup.starts import Start, api_start, server_start

_MAX_MODEL_LEN = 1024


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns 1 if a contender failed."""
    args = parse_arguments(arguments)
    vllm, skipped = None if args.no_peer else find_peer("vllm", args.peer_python["vllm"]), {}
    if isinstance(vllm, str):
        print(f"vllm is left out: {vllm}")
        vllm, skipped = None, {"vllm": vllm}
    cells = []
    for shape, dtype in args.cells:
        with tempfile.TemporaryDirectory() as folder:
            model = make_checkpoint(Path(folder), shape, dtype)
            add_tokenizer(model)
            starts, failures = run_rounds(contenders(args, str(model), dtype, vllm), args.rounds)
        cells.append({"shape": shape, "dtype": dtype, "failures": failures, "contenders": summarise(starts)})
        print_cell(cells[-1])
    report = {
        "benchmark": "startup",
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "threads": args.threads,
        "rounds": args.rounds,
        "skipped": skipped,
        "cells": cells,
    }
    print(json.dumps(report))
    return 1 if any(cell["failures"] for cell in cells) else 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; ``cells`` are the (shape, dtype) pairs, ``sizes`` the numbers of ranks."""
    parser = argparse.ArgumentParser(
        "tp-engine bench startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="A:bfloat16,B:bfloat16,B:float32,C:float32", help="SHAPE:DTYPE,...")
    parser.add_argument("--contenders", default="llm,server", help="of tp_engine: llm, server or both")
    parser.add_argument("--tensor-parallel-size", default="1", help="of tp_engine: one size, or several: 1,2")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; the median is shown")
    parser.add_argument("--threads", type=int, default=0, help="threads per rank (default: torch's choice)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest that a start may take")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="more for tp_engine, as JSON")
    parser.add_argument("--peer-options", type=json.loads, default={}, help='more for vLLM: {"enforce_eager": true}')
    parser.add_argument("--peer-python", action="append", default=[], metavar="vllm=PATH", help="vLLM's interpreter")
    parser.add_argument("--no-peer", action="store_true", help="measure tp_engine alone")
    args = parser.parse_args(arguments)
    args.cells = check_cells(["--cells", args.cells, "--no-peer"]).cells
    args.sizes = [int(size) for size in args.tensor_parallel_size.split(",")]
    if unknown := set(args.contenders.split(",")) - {"llm", "server"}:
        parser.error(f"--contenders names {', '.join(sorted(unknown))}; choose among llm and server")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; at least one must count")
    try:
        args.peer_python = parse_pythons(args.peer_python)
    except ValueError as error:
        parser.error(f"--peer-python: {error}")
    return args


Makers = dict[str, Callable[[], Start]]


def contenders(args: argparse.Namespace, model: str, dtype: str, vllm: Found | None) -> Makers:
    """Functions that each start a contender once: tp_engine's, and vLLM with tp_engine's options if it was found."""
    makers: Makers = {}
    common = {"dtype": dtype, "max_model_len": _MAX_MODEL_LEN}
    for size in args.sizes:
        spec = {"model": model, "options": common | args.engine_options, "threads": args.threads}
        if "llm" in args.contenders.split(","):
            parallel = spec | {"options": common | {"tensor_parallel_size": size} | args.engine_options}
            makers[f"tp_engine LLM TP {size}"] = partial(
                api_start, "tp_engine", sys.executable, parallel, timeout_s=args.timeout_s
            )
        if "server" in args.contenders.split(","):
            makers[f"tp_engine server TP {size}"] = partial(server_start, spec, size=size, timeout_s=args.timeout_s)
    if vllm is not None:
        options = common | {"disable_log_stats": True} | args.peer_options
        spec = {"model": model, "options": options, "threads": args.threads}
        makers[f"vllm {vllm.version}".strip()] = partial(api_start, "vllm", vllm.python, spec, timeout_s=args.timeout_s)
    return makers


def run_rounds(makers: Makers, num_rounds: int) -> tuple[dict[str, list[Start]], dict[str, str]]:
    """Each contender's counted starts, and the reason of each failure; the contenders alternate."""
    starts: dict[str, list[Start]] = {name: [] for name in makers}
    failures: dict[str, str] = {}
    for number in range(num_rounds + 1):
        for name, make in makers.items():
            if name in failures:
                continue
            try:
                start = make()
            except RuntimeError as error:
                failures[name] = str(error)
                print(f"{name} failed: {error}", file=sys.stderr)
                continue
            if number > 0:
                starts[name].append(start)
    return starts, failures


def summarise(starts: Mapping[str, list[Start]]) -> list[dict[str, Any]]:
    """Medians by contender; ``ratio`` is vLLM's time to the first token over this one's."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "ready_s": median(one.marks["ready"] for one in runs),
            "first_token_s": median(one.marks["first token"] for one in runs),
            "cpu_s": median(one.cpu_s for one in runs),
            "phases": _medians([one.phases for one in runs]),
            "within": _medians([one.within for one in runs]),
        }
        for name, runs in starts.items()
        if runs
    ]
    peers = [row["first_token_s"] for row in rows if row["name"].startswith("vllm")]
    return [row | {"ratio": peers[0] / row["first_token_s"] if peers else None} for row in rows]


def _medians(runs: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs if name in run) for name in runs[0]}


def print_cell(cell: Mapping[str, Any]) -> None:
    """Print each contender's total, then its phases, then the known parts of the phases."""
    print(f"\nshape {cell['shape']} in {cell['dtype']}, seconds")
    for row in cell["contenders"]:
        ratio = "" if row["ratio"] is None else f"   vLLM takes {row['ratio']:.2f}x"
        print(
            f"{row['name']:<24} ready {row['ready_s']:6.2f}   first token {row['first_token_s']:6.2f}   "
            f"CPU {row['cpu_s']:6.2f}{ratio}"
        )
        for title, key in (("to", "phases"), ("of that", "within")):
            if row[key]:
                print(f"    {title} " + "   ".join(f"{name} {taken_s:.2f}" for name, taken_s in row[key].items()))
