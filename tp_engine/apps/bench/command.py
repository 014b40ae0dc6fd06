"""``tp-engine bench NAME``: finds the benchmark and runs it; each imports only what it needs."""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from tp_engine.errors import ConfigError, did_you_mean


class Benchmark(NamedTuple):
    """A folder beside this file, the arguments that precede the user's, and what it measures."""

    folder: str
    arguments: tuple[str, ...]
    summary: str


BENCHMARKS = {
    "serve": Benchmark("serving", (), "a sweep of request rates over HTTP, against a running server or its own"),
    "offline": Benchmark("offline", (), "the engine without HTTP, on several workloads, beside transformers"),
    "latency": Benchmark("offline", ("--no-peer", "--workloads", "latency"), "one request at a time"),
    "throughput": Benchmark("offline", ("--no-peer", "--workloads", "throughput"), "as many requests as fit"),
    "startup": Benchmark("startup", (), "from the begin of a process to the first token, beside vLLM"),
    "frontend": Benchmark("serving", ("--fake-engine",), "the HTTP process before an engine that computes nothing"),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark with the arguments that follow its name; returns its exit code."""
    name, *arguments = argv or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name}; choose {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    module = importlib.import_module(f"tp_engine.apps.bench.{benchmark.folder}.command")
    code: int = module.main([*benchmark.arguments, *arguments])
    return code


def usage() -> str:
    lines = [f"  {name:<12}{benchmark.summary}" for name, benchmark in BENCHMARKS.items()]
    return "\n".join(
        ("usage: tp-engine bench NAME [options]", "", *lines, "", "tp-engine bench NAME --help tells its options.")
    )
