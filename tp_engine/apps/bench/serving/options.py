"""The command line of the serving benchmark; options that ``vllm bench serve`` has too keep its names."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from tp_engine.apps.bench.gate import add_gate_options
from tp_engine.apps.bench.plot import earlier_run, plot_file
from tp_engine.apps.bench.serving.metrics import GOODPUT_NAMES
from tp_engine.apps.bench.shapes import DUMMY_SHAPES


def parse_arguments(description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """Options as attributes; ``goodput`` and ``percentiles`` are parsed."""
    parser = argparse.ArgumentParser(
        "tp-engine bench serve", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_argument_group("the server")
    server.add_argument("--base-url", help="a running server; without it, tp_engine's is started")
    server.add_argument("--model", help="name to ask for (default: the server's first); what a started server loads")
    server.add_argument("--shape", choices=DUMMY_SHAPES, help="start a server with random weights in this shape")
    server.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of a started server")
    server.add_argument("--fake-engine", action="store_true", help="start a server whose engine computes nothing")
    server.add_argument("--server-args", type=shlex.split, default=[], help="more arguments for a started server")
    server.add_argument("--endpoint", default="/v1/completions", help="or /v1/chat/completions, with a file of prompts")
    server.add_argument("--api-key")
    traffic = parser.add_argument_group("the traffic")
    traffic.add_argument("--request-rate", type=rate_list, default="inf", help="requests per second; several: 1,4,inf")
    traffic.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: steadier")
    traffic.add_argument("--max-concurrency", type=int, help="most requests under way; more wait in this client")
    traffic.add_argument("--num-prompts", type=int, default=200, help="requests per rate")
    traffic.add_argument("--num-warmups", type=int, default=4, help="requests before the sweep, not counted")
    traffic.add_argument("--dataset-path", type=Path, help='prompts, {"prompt": ..., "output_tokens": 64} a line')
    traffic.add_argument("--input-len", type=int, default=512, help="tokens of a random prompt")
    traffic.add_argument("--output-len", type=int, default=128, help="tokens to generate")
    traffic.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share around it")
    traffic.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    traffic.add_argument("--vocab-size", type=int, help="random ids are below it (default: the model's, or 10000)")
    traffic.add_argument("--no-ignore-eos", action="store_true", help="let answers end early")
    traffic.add_argument("--extra-body", type=json.loads, default={}, help="JSON that every request also carries")
    traffic.add_argument("--timeout-s", type=float, default=600.0, help="longest time of one request")
    traffic.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("the figures")
    output.add_argument("--goodput", nargs="*", default=[], help="limits in ms such as ttft:500 tpot:50 e2el:9000")
    output.add_argument("--metric-percentiles", default="50,90,99")
    output.add_argument("--result-dir", type=Path, help="folder for JSON files and the server's log")
    output.add_argument("--save-detailed", action="store_true", help="also keep the times of every single request")
    output.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw latency and throughput over load: .svg, .png"
    )
    output.add_argument("--plot-name", default="tp_engine", help="this server's name in the plot")
    beside = "another run in the same plot: the folder of its --result-dir, or of vllm bench serve --save-result"
    output.add_argument("--plot-beside", type=earlier_run, nargs="*", default=[], metavar="NAME=FOLDER", help=beside)
    add_gate_options(parser)
    args = parser.parse_args(arguments)
    if args.base_url and (args.shape or args.server_args or args.fake_engine):
        parser.error("--shape, --fake-engine and --server-args are for a server that is started; leave --base-url out")
    if args.fake_engine and (args.shape or args.tensor_parallel_size > 1):
        parser.error("--fake-engine is one rank without a model; leave --shape and --tensor-parallel-size out")
    if args.plot and (args.record or args.against):
        parser.error("--plot draws a single run; leave --record and --against out")
    args.goodput = parse_goodput(parser, args.goodput)
    args.percentiles = sorted({float(part) for part in args.metric_percentiles.split(",")} | {99.0})
    return args


def rate_list(text: str) -> list[float]:
    """``1,2.5,inf``."""
    rates = [float(part) for part in text.split(",")]
    if any(not rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be positive numbers, or inf")
    return rates


def parse_goodput(parser: argparse.ArgumentParser, pairs: list[str]) -> dict[str, float]:
    """``ttft:500`` -> ``{"ttft": 500.0}``."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in GOODPUT_NAMES or not value.replace(".", "", 1).isdigit():
            parser.error(f"--goodput {pair}: give {', '.join(GOODPUT_NAMES)} with milliseconds, such as ttft:500")
        limits[name] = float(value)
    return limits
