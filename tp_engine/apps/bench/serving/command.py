"""Serving benchmark: measure an OpenAI-compatible server over HTTP at several request rates.

    tp-engine bench serve --base-url http://127.0.0.1:8000 --request-rate 1,2,4,8,inf --num-prompts 200
    tp-engine bench serve --model PATH --tensor-parallel-size 2 --goodput ttft:500 tpot:50
    tp-engine bench serve --fake-engine --max-concurrency 64           the HTTP process alone
    tp-engine bench serve --shape qwen3-0.6b --server-args "--max-model-len 2048"            on a GPU

Without --base-url it starts tp_engine's server and stops it at the end.  Arrivals follow a Poisson process and do not
wait for earlier answers.  It prints one line per rate; the last line is one JSON object whose "results" have the field
names of ``vllm bench serve``.  --result-dir keeps a JSON file per rate.  --plot draws latency and throughput over load,
with other runs and engines in the same figure:

    tp-engine bench serve --base-url http://127.0.0.1:9000 --request-rate 1,2,4,8 --result-dir vllm
    tp-engine bench serve --request-rate 1,2,4,8 --plot load.svg --plot-beside vllm=vllm

--record and --against make a gate of it, for jobs of CI: all is measured several times, and compared with its noise.

    tp-engine bench serve --model PATH --record baseline.json
    tp-engine bench serve --model PATH --against baseline.json --tolerance 5% --junit results/speed.xml
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.apps.bench.gate import (
    SEEDS_OF_A_REPEAT,
    SpeedGate,
    SpeedRun,
    digest_of,
    figures_by_name,
    name_of_model,
)
from tp_engine.apps.bench.machine import processor_name
from tp_engine.apps.bench.plot import plot_over_load
from tp_engine.apps.bench.serving.client import Target, TimedAnswer, first_model, kernel_choices, send_all
from tp_engine.apps.bench.serving.launch import own_server
from tp_engine.apps.bench.serving.metrics import details, summarise
from tp_engine.apps.bench.serving.options import parse_arguments
from tp_engine.apps.bench.serving.traffic import arrival_times, make_requests
from tp_engine.apps.bench.shapes import make_folder
from tp_engine.apps.gates.report import EXIT_UNDECIDED, GateReport
from tp_engine.errors import printable

_COLUMNS = (
    ("rate", "request_rate", ""), ("done", "completed", ""), ("failed", "failed", ""),
    ("req/s", "request_throughput", ".2f"), ("good/s", "request_goodput", ".2f"),
    ("tokens/s", "output_throughput", ".0f"),
    ("TTFT ms", "median_ttft_ms", ".1f"), ("p99", "p99_ttft_ms", ".1f"),
    ("TPOT ms", "median_tpot_ms", ".2f"), ("p99", "p99_tpot_ms", ".2f"),
    ("ITL ms", "median_itl_ms", ".2f"), ("p99", "p99_itl_ms", ".2f"),
    ("E2E ms", "median_e2el_ms", ".0f"), ("p99", "p99_e2el_ms", ".0f"),
)  # fmt: skip
_WARM_UP_SEED = 1_000_000
_GATED = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
# What decides the load, and the server under it.
_LOAD = (
    "tensor_parallel_size", "fake_engine", "server_args", "endpoint", "burstiness", "max_concurrency",
    "num_prompts", "input_len", "output_len", "random_range_ratio", "random_prefix_len", "vocab_size", "no_ignore_eos",
    "extra_body", "seed",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns 1 if any request failed, or a gate's exit code."""
    args = parse_arguments(__doc__, arguments)
    gate = SpeedGate.of(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a started server is stopped
    if gate is not None:
        try:
            verdict = measure_for(gate, args)
        except (OSError, RuntimeError) as error:  # 1 would mean a regression
            print(printable(f"tp-engine bench serve: error: {error}"), file=sys.stderr, flush=True)
            return EXIT_UNDECIDED
        print(verdict.as_text())
        print(json.dumps(json.loads(verdict.as_json())))
        return verdict.exit_code
    report = run_once(args)
    if args.plot is not None:
        runs = {args.plot_name: report["results"], **dict(args.plot_beside)}
        plot_over_load(runs, f"{report['results'][0]['model_id']} on {report['machine']}", args.plot)
    print(json.dumps(report))
    return 1 if any(result["failed"] for result in report["results"]) else 0


def run_once(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rates, with a server that starts now if none runs."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.result_dir is not None:
            args.result_dir.mkdir(parents=True, exist_ok=True)
        base_url = args.base_url or stack.enter_context(started_server(args, folder))
        return asyncio.run(sweep(args, base_url))


def measure_for(gate: SpeedGate, args: argparse.Namespace) -> GateReport:
    """Measure as often as the gate wants; what cannot be compared is refused first."""
    from tp_engine.config import DEMO_MODEL

    model = args.shape or args.model
    if args.base_url:
        model = asyncio.run(find_target(args, args.base_url)).model
    run = SpeedRun(
        benchmark="serve",
        machine=processor_name(),
        model=name_of_model(model or DEMO_MODEL),
        options=load_of(args),
    )
    if (refusal := gate.refusal(run)) is not None:
        return refusal
    figures, failed = [], 0
    for number in range(gate.repeats):
        once = argparse.Namespace(**vars(args) | {"seed": args.seed + number * SEEDS_OF_A_REPEAT})
        if args.result_dir is not None:
            once.result_dir = args.result_dir / f"repeat-{number + 1}"
        results = run_once(once)["results"]
        failed += sum(result["failed"] for result in results)
        figures.append({f"rate {one['request_rate']}, {name}": one[name] for one in results for name in _GATED})
    failures = f"{failed} of {gate.repeats * len(args.request_rate) * args.num_prompts} failed" if failed else ""
    return gate.judge(msgspec.structs.replace(run, figures=figures_by_name(figures)), failures)


def load_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for figures to be compared, as JSON."""
    dataset = None if args.dataset_path is None else digest_of(args.dataset_path)
    rates = [str(rate) for rate in args.request_rate]
    load = {name: getattr(args, name) for name in _LOAD}
    return {"started": not args.base_url, "request_rate": rates, "dataset": dataset, **load}


@contextlib.contextmanager
def started_server(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """tp_engine's own server for this run; yields its URL."""
    from tp_engine.config import DEMO_MODEL
    from tp_engine.model_config import load_model_config

    model, arguments = args.model or str(DEMO_MODEL), list(args.server_args)
    if args.shape:
        model = str(make_folder(folder, args.shape, "bfloat16"))
        arguments += ["--load-format", "dummy"]
    args.model = None
    args.vocab_size = args.vocab_size or load_model_config(model)[0].vocab_size
    args.extra_body = {"return_token_ids": True} | args.extra_body  # a chunk for every token, whatever its text
    log = (args.result_dir or folder) / "server.log"
    program: Sequence[str] = ("tp_engine", "serve")
    if args.fake_engine:
        program, arguments = ("tp_engine.apps.bench.serving.fake_server",), ["--generation-config", "vllm", *arguments]
    with own_server(["--model", model, *arguments], args.tensor_parallel_size, log, program=program) as url:
        yield url


async def sweep(args: argparse.Namespace, base_url: str) -> dict[str, Any]:
    """Measure one rate after the other, each with fresh prompts; print and save each result at once."""
    args.vocab_size = args.vocab_size or 10_000
    target = await find_target(args, base_url)
    await send_all(target, make_requests(args, args.num_warmups, _WARM_UP_SEED), [0.0] * args.num_warmups, None)
    print("".join(f"{title:>10}" for title, _, _ in _COLUMNS), flush=True)
    results = []
    for number, rate in enumerate(args.request_rate):
        result, answers = await measure(args, target, rate, args.seed + number)
        results.append(result)
        print("".join(_cell(result[field], style) for _, field, style in _COLUMNS), flush=True)
        for error in sorted({answer.error for answer in answers if not answer.success})[:3]:
            print(f"    failed: {printable(error)}", flush=True)
        save(args, result, answers)
    return {
        "benchmark": "serve",
        "machine": processor_name(),
        "kernel_choices": await kernel_choices(target),
        "started": not args.base_url,
        "results": results,
    }


async def find_target(args: argparse.Namespace, base_url: str) -> Target:
    """The server, with the model to ask for."""
    answers_in_full = {} if args.no_ignore_eos else {"ignore_eos": True}
    target = Target(
        base_url=base_url,
        endpoint=args.endpoint,
        model=args.model or "",
        api_key=args.api_key,
        timeout_s=args.timeout_s,
        extra_body={"temperature": 0} | answers_in_full | args.extra_body,
    )
    if args.model:
        return target
    return dataclasses.replace(target, model=await first_model(target))


async def measure(
    args: argparse.Namespace, target: Target, rate: float, seed: int
) -> tuple[dict[str, Any], list[TimedAnswer]]:
    """Measure one rate; returns its settings and figures."""
    requests = make_requests(args, args.num_prompts, seed)
    times = arrival_times(len(requests), rate, args.burstiness, seed)
    answers, duration_s = await send_all(target, requests, times, args.max_concurrency)
    settings = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if args.endpoint.endswith("/chat/completions") else "openai",
        "model_id": target.model,
        "num_prompts": args.num_prompts,
        "request_rate": rate if rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    return settings | summarise(answers, duration_s, args.percentiles, args.goodput), answers


def save(args: argparse.Namespace, result: dict[str, Any], answers: list[TimedAnswer]) -> None:
    """Write one rate's file in the form of ``vllm bench serve --save-result``."""
    if args.result_dir is None:
        return
    content = result | (details(answers) if args.save_detailed else {})
    (args.result_dir / f"rate-{result['request_rate']}.json").write_text(json.dumps(content), encoding="utf-8")


def _cell(value: Any, style: str) -> str:
    return f"{'-' if value is None else format(value, style):>10}"
