"""Measure engines side by side on this machine's CPUs, and write the README's table.

    scripts/readme_figures --engine vLLM=PYTHON --engine llama.cpp=LLAMA_SERVER --left-out "SGLang=why"
    scripts/readme_figures --document        writes the table of docs/benchmarks/readme.json into README.md and docs/

Each engine is a server with the checkpoint in bfloat16; the same client sends each the same prompts.  PYTHON is an
interpreter that has the engine, LLAMA_SERVER a program in a tree of llama.cpp, whose gguf package converts the
checkpoint.  An engine that does not start, fails, or answers otherwise than rounding explains is left out with the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from figures.engines import ENGINES, Server, serving
from figures.measure import Cell, compare_answers, idle_shares, rounds
from figures.page import FIGURES, ROOT, update_documents
from tp_engine.apps.bench.machine import processor_name, read_bandwidth
from tp_engine.apps.bench.offline.engines import link_with_tokenizer
from tp_engine.apps.bench.shapes import make_checkpoint

MODELS = ("SmolLM2-135M", "B")
_NEAR = 1.0  # log-probability; logits of 16 to 64 in bfloat16 are 0.125 to 0.25 apart, and several roundings add up
_BUSY = 0.05  # of a core


def main(arguments: Sequence[str]) -> int:
    """Measure, or write the documents; returns the exit code."""
    args = parse_arguments(arguments)
    if args.document:
        update_documents(json.loads(args.out.read_text(encoding="utf-8")))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its servers are stopped then too
    end_s = time.monotonic() + args.budget_s
    report = facts(args) | {"models": [], "left_out": left_out(args)}
    for index, name in enumerate(args.models):
        now_s = time.monotonic()
        share_s = (end_s - now_s) / (len(args.models) - index)
        with tempfile.TemporaryDirectory(prefix="tp_engine-") as folder:
            report["models"].append(measure(args, name, Path(folder), now_s + share_s, report["left_out"]))
    print(json.dumps(report, indent=1))
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; ``engine`` and ``left_out`` are dictionaries by the names of engines."""
    parser = argparse.ArgumentParser(
        "scripts/readme_figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = [name for name in ENGINES if name != "tp_engine"]
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PATH", help=f"of {', '.join(peers)}")
    parser.add_argument("--left-out", action="append", default=[], metavar="NAME=REASON", help="a peer, and why")
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS, help=",".join(MODELS))
    parser.add_argument("--smollm2", type=Path, help="the folder that scripts/fetch_smollm2 prints")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--budget-s", type=float, default=780.0, help="no round begins that would end later")
    parser.add_argument("--out", type=Path, default=FIGURES, help="the file of figures")
    parser.add_argument("--document", action="store_true", help="write the file's table into the documents")
    args = parser.parse_args(arguments)
    for option in ("engine", "left_out"):
        pairs = dict(pair.partition("=")[::2] for pair in getattr(args, option))
        if wrong := [name for name, value in pairs.items() if name not in peers or not value]:
            parser.error(f"--{option.replace('_', '-')} names {', '.join(wrong)}; give NAME=... of {', '.join(peers)}")
        setattr(args, option, pairs)
    args.engine = {"tp_engine": sys.executable, **args.engine}
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"--models names {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if args.smollm2 is None and MODELS[0] in args.models and not args.document:
        parser.error('give --smollm2 "$(scripts/fetch_smollm2)", or --models B')
    return args


def left_out(args: argparse.Namespace) -> dict[str, str]:
    """The peers that are not measured, with the reason of the command line, or else of the engine; one that is given is
    tried all the same."""
    refused = {name: reason for name, engine in ENGINES.items() if (reason := engine.refusal()) is not None}
    return {name: reason for name, reason in refused.items() if name not in args.engine} | dict(args.left_out)


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """The machine, the day, the code and the command, without this machine's paths."""
    git = ("git", "-C", str(ROOT))
    commit = subprocess.check_output((*git, "rev-parse", "HEAD"), text=True).strip()
    changed = subprocess.check_output((*git, "status", "--porcelain", "--untracked-files=no"), text=True)
    peers = [part for name in args.engine if name != "tp_engine" for part in ("--engine", f"{name}=PATH")]
    command = ["scripts/readme_figures", "--smollm2", "PATH", *peers, "--rounds", str(args.rounds)]
    return {
        "machine": processor_name(),
        "read_gb_per_s": round(read_bandwidth() / 1e9, 1),
        "load": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "commit": commit + (" with changes" if changed else ""),
        "command": shlex.join(command),
        "python": platform.python_version(),
        "versions": {name: ENGINES[name].version(program) for name, program in args.engine.items()},
    }


def measure(
    args: argparse.Namespace, name: str, folder: Path, end_s: float, left_out: dict[str, str]
) -> dict[str, Any]:
    """The figures of a model; engines that do not start move to ``left_out``."""
    model = folder / "model"
    if name == MODELS[0]:
        model.symlink_to(args.smollm2.resolve())
    else:
        (folder / "checkpoint").mkdir()
        link_with_tokenizer(make_checkpoint(folder / "checkpoint", name, "bfloat16"), model)
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with ExitStack() as stack:
        servers: list[Server] = []
        for engine, program in args.engine.items():
            if engine in left_out:
                continue
            try:
                servers.append(stack.enter_context(serving(engine, program, model, folder / f"{engine}.log")))
            except (RuntimeError, OSError) as error:
                if engine == "tp_engine":
                    raise
                left_out[engine] = str(error)
                print(f"{engine} is left out: {error}", file=sys.stderr)
        answers = compare_answers(servers, vocab_size)
        for one in answers:
            if one["largest_gap"] > _NEAR:
                left_out[one["engine"]] = f"its answers to {name} differ from tp_engine's by more than rounding"
        runs = rounds(servers, vocab_size, args.rounds, end_s, left_out)
        idle = idle_shares(servers)
    if busy := {engine: share for engine, share in idle.items() if share > _BUSY}:
        print(f"idle servers used processor time that others lacked: {busy}", file=sys.stderr)
    figures = [figure(cell, values) for cell, values in runs.items()]
    return {"model": name, "dtype": "bfloat16", "answers": answers, "idle_cores": idle, "figures": figures}


def figure(cell: Cell, values: Sequence[float]) -> dict[str, Any]:
    """A cell of the table with its spread: the lowest and the highest round."""
    rounded = [float(f"{value:.4g}") for value in values]
    spread = {"median": float(f"{median(values):.4g}"), "low": min(rounded), "high": max(rounded)}
    return {"workload": cell.workload, "unit": cell.unit, "engine": cell.engine, **spread, "rounds": rounded}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
