"""``tp-engine bench``: the benchmarks in scripts/, which a checkout has and the installed package has not."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tp_engine.errors import ConfigError, did_you_mean

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Benchmark(NamedTuple):
    """A script, the arguments that precede the user's, and what it measures."""

    script: str
    arguments: tuple[str, ...]
    summary: str


BENCHMARKS = {
    "serve": Benchmark("bench_serve", (), "a sweep of request rates over HTTP, against a running server or its own"),
    "offline": Benchmark("bench_offline", (), "the engine without HTTP, on several workloads, beside transformers"),
    "latency": Benchmark("bench_offline", ("--no-peer", "--workloads", "latency"), "one request at a time"),
    "throughput": Benchmark("bench_offline", ("--no-peer", "--workloads", "throughput"), "as many requests as fit"),
    "startup": Benchmark("bench_startup", (), "from the begin of a process to the first token, beside vLLM"),
    "frontend": Benchmark("bench_serve", ("--fake-engine",), "the HTTP process before an engine that computes nothing"),
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
    return run_script(benchmark.script, [*benchmark.arguments, *arguments])


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Call a script's ``main`` as if it had been started with ``arguments``; ``ConfigError`` without a checkout."""
    path = SCRIPTS / f"{script}.py"
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}: the benchmarks are not part of the installed package; run this in a checkout of the "
            "project's repository, installed with pip install -e ."
        )
    before = sys.argv, list(sys.path)
    sys.argv, sys.path = [str(path), *arguments], [str(SCRIPTS), *sys.path]
    try:
        code: int = importlib.import_module(script).main()
    finally:
        sys.argv, sys.path = before
    return code


def usage() -> str:
    lines = [f"  {name:<12}{benchmark.summary}" for name, benchmark in BENCHMARKS.items()]
    return "\n".join(
        ("usage: tp-engine bench NAME [options]", "", *lines, "", "tp-engine bench NAME --help tells its options.")
    )
