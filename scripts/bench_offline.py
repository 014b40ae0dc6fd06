"""Offline benchmark: tp_engine beside transformers on the same model, in one run.

    python scripts/bench_offline.py --shape C --dtype float32
    python scripts/bench_offline.py --model PATH --dtype bfloat16 --workloads latency,throughput --rounds 5
    python scripts/bench_offline.py --shape qwen3-0.6b --nano-vllm-path ~/nano-vllm          on a GPU
    python scripts/bench_offline.py --shape qwen3-8b --tensor-parallel-size 1,2 --devices 0,0 --no-peer

On CPUs the engines alternate; on a GPU each has the device's memory to itself, one after the other.  Prints per
workload the median of the rounds, the ratios between the engines, and the roofline that follows from what the machine
was measured to do in the same run; the last line is one JSON object.  The Qwen3 shapes have random ("dummy") weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from bench_contenders import engine_makers, run_all
from bench_machine import copy_bandwidth, matmul_rate, processor_name, read_bandwidth
from bench_roofline import Ceilings, ModelCost, decode_step_s, model_cost
from bench_shapes import DUMMY_SHAPES, SHAPES, make_folder
from bench_summary import print_table, summarise
from bench_workloads import LARGE_WORKLOADS, SMALL_WORKLOADS, WORKLOADS


def main() -> int:
    """Measure and print; 1 if an engine failed."""
    args = parse_arguments()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_folder(Path(folder), args.shape, args.dtype))
        report = compare(args, model)
    print_table(report)
    print(json.dumps(report))
    return 1 if report["failures"] else 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with what depends on the shape filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), *DUMMY_SHAPES], default="C", help="a model of this shape")
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; bfloat16 for Qwen3 shapes")
    parser.add_argument("--workloads", help="comma-separated: " + ", ".join(WORKLOADS))
    parser.add_argument("--tensor-parallel-size", default="1", help="one size, or several: 1,2,4")
    parser.add_argument("--devices", help="device of each rank, such as 0,0: several ranks on one GPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per engine; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="torch threads per rank (default: torch's choice)")
    parser.add_argument("--no-peer", action="store_true", help="measure tp_engine without transformers")
    parser.add_argument("--nano-vllm-path", type=Path, help="also measure the nano-vllm in this folder (GPU only)")
    parser.add_argument("--engine-options", type=json.loads, default={}, help='more for LLM: {"enforce_eager": true}')
    args = parser.parse_args(arguments)
    args.is_dummy = args.model is None and args.shape in DUMMY_SHAPES
    args.dtype = args.dtype or ("bfloat16" if args.is_dummy else "float32")
    args.workloads = args.workloads or ",".join(LARGE_WORKLOADS if args.is_dummy else SMALL_WORKLOADS)
    if unknown := set(args.workloads.split(",")) - set(WORKLOADS):
        parser.error(f"--workloads names {', '.join(sorted(unknown))}; choose among {', '.join(WORKLOADS)}")
    if args.nano_vllm_path and not (args.nano_vllm_path / "nanovllm").is_dir():
        parser.error(f"--nano-vllm-path is {args.nano_vllm_path}; it must be the folder that holds nanovllm/")
    return args


def compare(args: argparse.Namespace, model: str) -> dict[str, object]:
    """Run every workload on every engine; a fresh seed each round keeps prefix caches honest."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    cost, ceilings, vocab_size = model_cost(config, args.dtype), measure_ceilings(args), config["vocab_size"]
    runs, failures = run_all(engine_makers(args, model), args.workloads.split(","), vocab_size, args.rounds)
    results = [
        summarise(WORKLOADS[name](vocab_size, 0), measured, cost, ceilings)
        for name, measured in runs.items()
        if measured
    ]
    return describe(args, cost, ceilings) | {"failures": failures, "workloads": results}


def measure_ceilings(args: argparse.Namespace) -> Ceilings:
    """Of all devices that the largest engine uses; a CPU's cores are shared by its ranks."""
    if not torch.cuda.is_available():
        return Ceilings(bytes_per_s=read_bandwidth())
    num_devices = max(int(size) for size in args.tensor_parallel_size.split(","))
    if args.devices:
        num_devices = len(set(args.devices.split(",")))
    rate = matmul_rate(getattr(torch, args.dtype))
    return Ceilings(bytes_per_s=copy_bandwidth() * num_devices, flops_per_s=rate * num_devices)


def describe(args: argparse.Namespace, cost: ModelCost, ceilings: Ceilings) -> dict[str, object]:
    """What was run, on what, and what the machine can do."""
    on_gpu = torch.cuda.is_available()
    kind = "copy" if on_gpu else "read"
    rate = {"matmul_tflops": round(ceilings.flops_per_s / 1e12, 1)} if on_gpu else {}
    step_s = decode_step_s(cost, ceilings, num_rows=0, num_context_tokens=0)
    return {
        "shape": args.shape if args.model is None else args.model,
        "dtype": args.dtype,
        "machine": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rounds": args.rounds,
        "devices": args.devices,
        "engine_options": args.engine_options,
        "bandwidth": kind,
        f"{kind}_gb_per_s": round(ceilings.bytes_per_s / 1e9, 1),
        **rate,
        "decode_roofline_ms": round(step_s * 1e3, 4 if on_gpu else 2),
    }


if __name__ == "__main__":
    sys.exit(main())
