"""Offline benchmark: tp_engine beside transformers on the same checkpoint, alternating in one run.

    python scripts/bench_offline.py --shape C --dtype float32
    python scripts/bench_offline.py --model PATH --dtype bfloat16 --workloads latency,throughput --rounds 5

Prints per workload the median of the alternating rounds, the ratio of the two engines, and the machine's measured read
bandwidth with the decode roofline that follows from it; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_engines import Engine, Measurement, TpEngine, TransformersGenerate
from bench_machine import processor_name, read_bandwidth
from bench_workloads import SHAPES, WORKLOADS, Workload, make_checkpoint


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_checkpoint(Path(folder), args.shape, args.dtype))
        report = compare(args, model)
    print_table(report)
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="C", help="random weights in one of the known shapes"
    )
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated: " + ", ".join(WORKLOADS))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="torch threads per rank (default: torch's choice)")
    parser.add_argument("--no-peer", action="store_true", help="measure tp_engine alone")
    return parser.parse_args()


def compare(args: argparse.Namespace, model: str) -> dict[str, object]:
    """Run every workload on every engine in turn; a fresh seed each round keeps prefix caches honest."""
    bandwidth = read_bandwidth()
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 1024}
    engines: list[Engine] = [TpEngine(model, args.dtype, args.tensor_parallel_size, options)]
    if not args.no_peer:
        engines.append(TransformersGenerate(model, args.dtype))
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    results = []
    for name in args.workloads.split(","):
        make = WORKLOADS[name]
        for engine in engines:
            engine.run(make(vocab_size, 1_000_000))
        runs: dict[str, list[Measurement]] = {engine.name: [] for engine in engines}
        for seed in range(args.rounds):
            for engine in engines:
                runs[engine.name].append(engine.run(make(vocab_size, seed)))
        results.append(summarise(make(vocab_size, 0), runs))
    for engine in engines:
        engine.close()
    return {
        "shape": args.shape if args.model is None else args.model,
        "dtype": args.dtype,
        "machine": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        "read_gb_per_s": round(bandwidth / 1e9, 1),
        "decode_roofline_ms": round(bytes_per_step(Path(model), config) / bandwidth * 1e3, 2),
        "workloads": results,
    }


def bytes_per_step(model: Path, config: dict[str, Any]) -> int:
    """Bytes of weights that a decode step must read: all but an input embedding that is not the head's too."""
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if config["tie_word_embeddings"]:
        return num_bytes
    itemsize = 4 if config["dtype"] == "float32" else 2
    return num_bytes - int(config["vocab_size"]) * int(config["hidden_size"]) * itemsize


def summarise(workload: Workload, runs: dict[str, list[Measurement]]) -> dict[str, object]:
    """Medians per engine, and the ratio of the first engine to each other one (above 1: the first is faster)."""
    figures = {name: medians(workload, measured) for name, measured in runs.items()}
    first, *others = runs
    return {
        "workload": workload.name,
        "engines": figures,
        "speedup_over": {other: speedup(figures[first], figures[other]) for other in others},
        "equal_answers": {other: equal_share(runs[first], runs[other]) for other in others},
    }


def medians(workload: Workload, measured: list[Measurement]) -> dict[str, float]:
    """Output tokens per second and, for a single request, milliseconds to the first token and per token after it."""
    figure = {"tokens_per_s": workload.num_output_tokens / statistics.median(run.total_s for run in measured)}
    firsts = [run.first_token_s for run in measured if run.first_token_s is not None]
    if firsts:
        steps = workload.max_tokens[0] - 1
        after = [(run.total_s - first) / steps for run, first in zip(measured, firsts, strict=True)]
        figure |= {"ttft_ms": statistics.median(firsts) * 1e3, "ms_per_token": statistics.median(after) * 1e3}
    return {key: round(value, 3) for key, value in figure.items()}


def speedup(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """How many times faster we are: by time per token where one request runs, by throughput otherwise."""
    if "ms_per_token" in ours:
        return round(theirs["ms_per_token"] / ours["ms_per_token"], 2)
    return round(ours["tokens_per_s"] / theirs["tokens_per_s"], 2)


def equal_share(ours: list[Measurement], theirs: list[Measurement]) -> float:
    """Share of the answers whose tokens are all equal."""
    pairs = [
        mine == other
        for a, b in zip(ours, theirs, strict=True)
        for mine, other in zip(a.token_ids, b.token_ids, strict=True)
    ]
    return sum(pairs) / len(pairs)


def print_table(report: dict[str, object]) -> None:
    software = f"torch {report['torch']}, {report['threads']} threads"
    print(f"\n{report['machine']}; {software}; {report['dtype']}, shape {report['shape']}")
    ceiling = f"decode roofline {report['decode_roofline_ms']} ms per step"
    print(f"read bandwidth {report['read_gb_per_s']} GB/s: {ceiling}\n")
    print(f"{'workload':<16}{'engine':<26}{'tokens/s':>10}{'TTFT ms':>10}{'ms/token':>10}")
    workloads = report["workloads"]
    assert isinstance(workloads, list)
    for result in workloads:
        for name, figure in result["engines"].items():
            cells = [figure.get(key) for key in ("tokens_per_s", "ttft_ms", "ms_per_token")]
            shown = "".join(f"{cell:>10.2f}" if cell is not None else f"{'':>10}" for cell in cells)
            print(f"{result['workload']:<16}{name:<26}{shown}")
        for other, ratio in result["speedup_over"].items():
            share = result["equal_answers"][other]
            print(f"{'':<16}{ratio:.2f}x {other}; {share:.0%} of the answers equal")


if __name__ == "__main__":
    main()
