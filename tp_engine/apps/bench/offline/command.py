"""Offline benchmark: tp_engine beside other engines on the same model, in one run.

    tp-engine bench offline --shape C --dtype float32
    tp-engine bench offline --model PATH --dtype bfloat16 --workloads latency,throughput --rounds 5
    tp-engine bench offline --cells A:bfloat16,B:bfloat16,B:float32,C:float32 --threads 2 \\
        --peer transformers vllm ctranslate2 --peer-python vllm=~/vllm/bin/python
    tp-engine bench offline --cells A:bfloat16,B:bfloat16 --quantization int4,none,awq,gptq \\
        --peer llama.cpp:Q4_0 llama.cpp:Q4_K_M vllm:awq vllm:gptq --workloads latency,throughput --threads 2
    tp-engine bench offline --cells Q-mtp:bfloat16,B-mtp:bfloat16 --mtp 0,3 --no-peer \\
        --workloads latency,throughput --threads 2
    tp-engine bench offline --shape qwen3-0.6b --together --workloads latency,batch32,batch256 \\
        --peer vllm --peer-python vllm=~/vllm/bin/python --nano-vllm-path ~/nano-vllm          on a GPU
    tp-engine bench offline --shape qwen3-8b --tensor-parallel-size 1,2 --device-ids 0,0 --no-peer

    tp-engine bench offline --shape qwen3-0.6b --steps 32x128 --prefill-graphs "none;auto"

Each engine runs in its own process.  On CPUs the engines alternate.  On a GPU they run one after the other, each
alone in the device's memory; --together loads all at once, with equal shares of the memory, and they alternate there
too.  For each workload it prints the median of the rounds, the ratios between the engines, and the roofline of the
machine's rates, which are measured in the same run.  The last line is one JSON object; --plot draws all engines beside
each other.

The Qwen3 shapes have random ("dummy") weights; transformers and nano-vllm get a checkpoint of them, vllm draws its own.
The answers of nano-vllm and of vllm with its own weights are not compared.  A peer that is not found is left out, with
the reason.

Quantised weights are named after each engine, and ratios are those of the first kind of --quantization.  llama.cpp
quantises the checkpoint with its own defaults.  For awq and gptq the checkpoint is written in this packing, rounded to
the nearest code; vLLM and tp_engine read the same files.  The roofline always counts weights in the dtype of the cell.

--record and --against make a gate of tp_engine's figures, for jobs of CI: all is measured several times, and compared
with its noise.

    tp-engine bench offline --model PATH --workloads latency,throughput --record baseline.json
    tp-engine bench offline --model PATH --workloads latency,throughput --against baseline.json --tolerance 5%

--steps measures single steps of tp_engine instead: the time to the first token of a prompt that is alone, decode steps,
decode steps that also compute a prompt, the parts of a decode step's time, and the cost of CUDA graphs of prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tp_engine.apps.advice.sizes import ITEMSIZES
from tp_engine.apps.bench.gate import SpeedGate, SpeedRun, figures_by_name, name_of_model
from tp_engine.apps.bench.int4_checkpoint import PACKINGS
from tp_engine.apps.bench.machine import copy_bandwidth, cpu_matmul_rate, matmul_rate, processor_name, read_bandwidth
from tp_engine.apps.bench.offline.contenders import contenders, engine_options, memory_share, run_all
from tp_engine.apps.bench.offline.options import parse_arguments
from tp_engine.apps.bench.offline.summary import print_table, summarise
from tp_engine.apps.bench.plot import plot_workloads
from tp_engine.apps.bench.roofline import Ceilings, ModelCost, decode_step_s, model_cost
from tp_engine.apps.bench.shapes import make_folder
from tp_engine.apps.bench.steps import measure_steps, print_steps
from tp_engine.apps.bench.workloads import WORKLOADS
from tp_engine.apps.gates.report import GateReport
from tp_engine.model_config import read_model
from tp_engine.models.weight_sizes import local_weight_bytes

_GATED = ("tokens_per_s", "ttft_ms", "ms_per_token")
# What decides the load, and the engine under it.
_LOAD = ("dtype", "workloads", "tensor_parallel_size", "tp_invariant", "mtp", "quantization", "device_ids", "rounds",
         "threads", "engine_options")  # fmt: skip
_OPTIONS_OF_STEPS = ("dtype", "tensor_parallel_size", "load_format", "device_ids")


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns 1 if an engine failed."""
    args = parse_arguments(arguments, __doc__)
    gate = SpeedGate.of(args)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if gate is not None:
        verdict = measure_for(gate, args)
        print(verdict.as_text())
        print(json.dumps(json.loads(verdict.as_json())))
        return verdict.exit_code
    reports = run_cells(args)
    if args.plot is not None and not args.steps:
        results = [
            one | {"workload": one["workload"] if len(reports) == 1 else f"{one['workload']}\n{cell}"}
            for report, cell in zip(reports, (f"{shape} {dtype}" for shape, dtype in args.cells), strict=True)
            for one in report["workloads"]
        ]
        plot_workloads(results, f"{reports[0]['shape']} on {reports[0]['machine']}", args.plot)
    print(json.dumps(reports[0] if len(reports) == 1 else {"benchmark": "offline", "cells": reports}))
    return 1 if any(report.get("failures") for report in reports) else 0


def run_cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cells, and print each; returns their reports."""
    reports: list[dict[str, Any]] = []
    for shape, dtype in args.cells:
        cell = argparse.Namespace(**vars(args) | {"shape": shape, "dtype": dtype})
        with tempfile.TemporaryDirectory() as folder:
            model = args.model or str(make_folder(Path(folder), shape, dtype))
            reports.append(profile_steps(cell, model) if args.steps else compare(cell, model))
        (print_steps if args.steps else print_table)(reports[-1])
    return reports


def measure_for(gate: SpeedGate, args: argparse.Namespace) -> GateReport:
    """Measure as often as the gate wants; what cannot be compared is refused first."""
    run = SpeedRun(
        benchmark="offline",
        machine=processor_name(),
        model=name_of_model(args.model) if args.model else ", ".join(f"{shape} {dtype}" for shape, dtype in args.cells),
        options={name: getattr(args, name) for name in _LOAD},
    )
    if (refusal := gate.refusal(run)) is not None:
        return refusal
    repeats = [run_cells(args) for _ in range(gate.repeats)]
    figures = [
        {
            f"{report['shape']} {report['dtype']}, {one['workload']}, {engine}, {name}": figure[name]
            for report in reports
            for one in report["workloads"]
            for engine, figure in one["engines"].items()
            for name in _GATED
            if name in figure
        }
        for reports in repeats
    ]
    failures = {
        f"{name} failed: {error}" for one in repeats for report in one for name, error in report["failures"].items()
    }
    return gate.judge(msgspec.structs.replace(run, figures=figures_by_name(figures)), "; ".join(sorted(failures)))


def compare(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run every workload on every engine; each round has a fresh seed, so that no prefix cache knows its prompts."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    cost, ceilings, vocab_size = model_cost(config, args.dtype), measure_ceilings(args), config["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        makers, skipped = contenders(args, model, Path(folder))
        share = memory_share(args, len(makers))
        runs, failures = run_all(makers, args.workloads.split(","), vocab_size, args.rounds, share)
    results = [
        summarise(WORKLOADS[name](vocab_size, 0), measured, cost, ceilings)
        for name, measured in runs.items()
        if measured
    ]
    found = {"memory_share": share, "failures": failures, "skipped": skipped, "workloads": results}
    return describe(args, cost, ceilings) | {"weight_bytes": weight_bytes(config, args)} | found


def profile_steps(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Measure single steps of one engine for each value of --prefill-graphs."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    cost, ceilings = model_cost(config, args.dtype), measure_ceilings(args)
    common = engine_options(args, int(args.tensor_parallel_size))
    options = {name: common[name] for name in _OPTIONS_OF_STEPS if name in common} | args.engine_options
    sizes = args.prefill_graphs.split(";")
    results = measure_steps(model, options, sizes, (*args.steps, args.num_steps), cost, ceilings)
    facts = {"benchmark": "steps", "batch_size": args.steps[0], "prompt_len": args.steps[1], "results": results}
    return facts | describe(args, cost, ceilings)


def weight_bytes(config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, int]:
    """Bytes of the weights that a token needs, for each quantization; an untied input embedding does not count."""
    model = read_model(config)
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * ITEMSIZES[args.dtype]
    options: dict[str, Any] = {"dtype": args.dtype, "active_only": True}
    kinds = [kind for kind in args.quantization.split(",") if kind not in PACKINGS]
    return {
        kind: local_weight_bytes(model, 1, quantization=None if kind == "none" else kind, **options) - embedding
        for kind in kinds
    }


def measure_ceilings(args: argparse.Namespace) -> Ceilings:
    """The combined rates of all devices that the largest engine uses; ranks on a CPU share its cores."""
    if not torch.cuda.is_available():
        rate = cpu_matmul_rate(getattr(torch, args.dtype))
        return Ceilings(bytes_per_s=read_bandwidth(), flops_per_s=rate)
    num_devices = max(int(size) for size in args.tensor_parallel_size.split(","))
    if args.device_ids:
        num_devices = len(set(args.device_ids.split(",")))
    bandwidth, rate = copy_bandwidth(), matmul_rate(getattr(torch, args.dtype))
    torch.cuda.empty_cache()  # engines need the memory
    return Ceilings(bytes_per_s=bandwidth * num_devices, flops_per_s=rate * num_devices)


def describe(args: argparse.Namespace, cost: ModelCost, ceilings: Ceilings) -> dict[str, object]:
    """The model, the options, the machine and its measured rates."""
    on_gpu = torch.cuda.is_available()
    kind = "copy" if on_gpu else "read"
    step_s = decode_step_s(cost, ceilings, num_rows=1, num_context_tokens=0)
    return {
        "shape": args.shape if args.model is None else args.model,
        "dtype": args.dtype,
        "machine": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rounds": args.rounds,
        "device_ids": args.device_ids,
        "engine_options": args.engine_options,
        "bandwidth": kind,
        f"{kind}_gb_per_s": round(ceilings.bytes_per_s / 1e9, 1),
        "matmul_tflops": round(ceilings.flops_per_s / 1e12, 1 if on_gpu else 3),
        "decode_roofline_ms": round(step_s * 1e3, 4),
    }
