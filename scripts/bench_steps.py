"""Profile decode steps: the time per step, a GPU's wait between two steps, and what a CPU does within a step.

    python scripts/bench_steps.py --shape qwen3-0.6b --batch-size 256 --context-len 512
    python scripts/bench_steps.py --shape B --dtype bfloat16 --batch-size 32 --context-len 72 --threads 2   on a CPU
    python scripts/bench_steps.py --shape qwen3-8b --batch-size 32 --context-len 128 --prompts "none;auto"

All requests decode together.  First the period of a step is timed without a profiler; then the same number of steps
runs under torch's profiler.  The GPU is idle while no kernel or copy runs.  The gap between two steps is the longest
idle time in each step's period.  It also prints the time of each kernel (on CPUs: rank 0's).  Ends with one JSON line.

--prompts measures an engine for each value of --cudagraph-prefill-capture-sizes instead: the time to the first token of
a prompt that is alone, decode steps, steps that compute a prompt too, and what the graphs cost in time and memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.machine import copy_bandwidth, cpu_matmul_rate, matmul_rate, processor_name, read_bandwidth
from benchmarks.prompt_steps import compare_prompts
from benchmarks.roofline import Ceilings, decode_step_s, model_cost
from benchmarks.shapes import DUMMY_SHAPES, SHAPES, make_folder
from torch.profiler import ProfilerActivity, profile, record_function

from tp_engine.cpu.kernels.tape import naming_calls

Interval = tuple[float, float]

_WARM_UP_STEPS = 16
_BUDGET = 16384
_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_LENGTH = 80  # a library's kernel name includes template arguments and can be very long


def main() -> int:
    """Measure and print."""
    args = parse_arguments()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.model) if args.model else make_folder(Path(name), args.shape, args.dtype)
        if args.prompts:
            report = measure_prompts(args, folder)
        else:
            report = measure(args, folder, Path(name) / "trace.json" if args.trace is None else args.trace)
    for key, value in report.items():
        print(f"{key:<32}{value}")
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), *DUMMY_SHAPES], default="C")
    parser.add_argument("--model", help="a checkpoint folder, instead of --shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--context-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="steps that are timed, and steps that are profiled")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--threads", type=int, help="on a CPU; default: torch's")
    parser.add_argument("--device-ids", help="device of each rank, such as 0,0")
    parser.add_argument("--engine-options", type=json.loads, default={}, help='more for LLM: {"enforce_eager": true}')
    parser.add_argument("--prompts", metavar="SIZES", help='steps with prompts, such as "none;auto" (see above)')
    parser.add_argument("--trace", type=Path, help="keep the profiler's trace in this file")
    return parser.parse_args(arguments)


def measure_prompts(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare engines by their graphs of prompts."""
    options, sizes = _common_options(args) | args.engine_options, args.prompts.split(";")
    found = compare_prompts(folder, options, sizes, args.batch_size, args.context_len, args.steps)
    return {
        "benchmark": "prompts",
        "machine": processor_name(),
        "shape": args.model or args.shape,
        "dtype": args.dtype,
        "prompt_len": args.context_len,
        "batch_size": args.batch_size,
        "results": found,
    }


def measure(args: argparse.Namespace, folder: Path, trace: Path) -> dict[str, Any]:
    """Time the steps of one engine; only rank 0's GPU is profiled."""
    from tp_engine import LLM

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ceilings = _ceilings(args)
    with LLM(str(folder), **_engine_options(args)) as llm:
        _start_requests(llm, args, config["vocab_size"])
        period_s = _period(llm, args.steps)
        if torch.cuda.is_available():
            found = _profiled(llm, args.steps, trace, period_s * 1e6)
        else:
            found = {"kernels_us": kernel_times(llm.engine.step, args.steps, period_s * 1e6)}
    cost, rows = model_cost(config, args.dtype), args.batch_size
    tokens = rows * (args.context_len + _WARM_UP_STEPS + args.steps // 2)
    least_s = decode_step_s(cost, ceilings, num_rows=rows, num_context_tokens=tokens)
    return {
        "benchmark": "steps",
        "machine": processor_name(),
        "shape": args.model or args.shape,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "context_len": args.context_len,
        "tensor_parallel_size": args.tensor_parallel_size,
        "device_ids": args.device_ids,
        "step_ms": round(period_s * 1e3, 4),
        "tokens_per_s": round(args.batch_size / period_s, 1),
        "roofline_ms": round(least_s * 1e3, 4),
        "share_of_roofline": round(least_s / period_s, 3),
        **found,
    }


def idle_intervals(busy: Sequence[Interval]) -> list[float]:
    """Lengths of the gaps between intervals, in order of time; intervals may overlap."""
    gaps, end = [], None
    for begin, until in sorted(busy):
        if end is not None and begin > end:
            gaps.append(begin - end)
        end = until if end is None else max(end, until)
    return gaps


def device_figures(events: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Busy and idle time per step and the gap between two steps, from a Chrome trace's events (microseconds).  A step's
    period has at least one gap; the ``num_steps - 1`` longest gaps count as those between the steps."""
    busy = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_EVENTS
    ]
    gaps = idle_intervals(busy)
    if not gaps:
        return {}
    span = max(end for _, end in busy) - min(begin for begin, _ in busy)
    between = sorted(gaps)[-(num_steps - 1) :]
    return {
        "device_busy_us_per_step": round((span - sum(gaps)) / num_steps, 1),
        "device_idle_us_per_step": round(sum(gaps) / num_steps, 1),
        "gap_us_median": round(statistics.median(between), 1),
        "gap_us_max": round(between[-1], 1),
        "device_events_per_step": round(len(busy) / num_steps, 1),
    }


def device_kernels(events: Sequence[dict[str, Any]], num_steps: int, period_us: float) -> dict[str, float]:
    """Microseconds per step of each kernel and copy, longest first; ``other`` sums those below a hundredth."""
    times: dict[str, float] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_EVENTS:
            name = str(event["name"])[:_NAME_LENGTH]
            times[name] = times.get(name, 0.0) + float(event["dur"]) / num_steps
    longest = sorted(((us, name) for name, us in times.items() if us >= period_us / 100), reverse=True)
    other = sum(times.values()) - sum(us for us, _ in longest)
    return {name: round(us, 1) for us, name in longest} | {"other": round(other, 1)}


def kernel_times(step: Callable[[], object], num_steps: int, period_us: float) -> dict[str, float]:
    """Own microseconds per step of this process's compiled kernels and PyTorch operations, longest first.
    ``period_us`` is a step's time without a profiler.  ``other`` sums functions below a hundredth of it, and the rest
    of the step: Python, dispatch, the calls themselves."""
    with profile(activities=[ProfilerActivity.CPU]) as found, naming_calls(record_function):
        for _ in range(num_steps):
            step()
    times = {event.key: event.self_cpu_time_total / num_steps for event in found.key_averages()}
    longest = sorted(((us, name) for name, us in times.items() if us >= period_us / 100), reverse=True)
    other = max(0.0, period_us - sum(us for us, _ in longest))
    return {name: round(us, 1) for us, name in longest} | {"other": round(other, 1)}


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    limits = {
        "max_model_len": args.context_len + _output_len(args),
        "max_num_seqs": args.batch_size,
        "max_num_batched_tokens": _BUDGET,
    }
    return _common_options(args) | limits | dict(args.engine_options)


def _common_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": args.dtype, "tensor_parallel_size": args.tensor_parallel_size}
    if args.model is None and args.shape in DUMMY_SHAPES:
        options["load_format"] = "dummy"
    if args.device_ids:
        options["device_ids"] = args.device_ids
    return options


def _output_len(args: argparse.Namespace) -> int:
    """Enough tokens for the first request to run until the last prompt is computed, and through all steps after it."""
    num_prompt_steps: int = -(-args.batch_size * args.context_len // (_BUDGET - args.batch_size))
    return 2 * num_prompt_steps + _WARM_UP_STEPS + 2 * int(args.steps) + 16


def _ceilings(args: argparse.Namespace) -> Ceilings:
    if not torch.cuda.is_available():
        return Ceilings(bytes_per_s=read_bandwidth(), flops_per_s=cpu_matmul_rate(getattr(torch, args.dtype)))
    num_devices = len(set(args.device_ids.split(","))) if args.device_ids else args.tensor_parallel_size
    rate = matmul_rate(getattr(torch, args.dtype))
    return Ceilings(bytes_per_s=copy_bandwidth() * num_devices, flops_per_s=rate * num_devices)


def _start_requests(llm: Any, args: argparse.Namespace, vocab_size: int) -> None:
    """Add all requests and run steps until all of them have decoded for a while."""
    from tp_engine import SamplingParams

    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=_output_len(args))
    for number in range(args.batch_size):
        prompt = rng.integers(3, vocab_size, args.context_len).tolist()
        llm.engine.add_request(llm.input_processor.process(prompt, params, request_id=str(number)))
    num_full = 0
    while num_full < _WARM_UP_STEPS:
        num_full += len(llm.engine.step()) == args.batch_size
        if not llm.engine.has_unfinished:
            raise RuntimeError(f"{args.batch_size} requests do not fit at once; lower --batch-size or --context-len")


def _period(llm: Any, num_steps: int) -> float:
    """Seconds per step, results included."""
    started = time.perf_counter()
    for _ in range(num_steps):
        llm.engine.step()
    return (time.perf_counter() - started) / num_steps


def _profiled(llm: Any, num_steps: int, trace: Path, period_us: float) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            llm.engine.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return device_figures(events, num_steps) | {"kernels_us": device_kernels(events, num_steps, period_us)}


if __name__ == "__main__":
    sys.exit(main())
