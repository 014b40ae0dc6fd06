"""The gate of speed: verdicts from repeats, what is not compared, and the two benchmarks that have it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tp_engine.apps.bench.gate import SpeedGate, SpeedRun, differences, name_of_model, read_baseline, speed_line
from tp_engine.apps.bench.offline import command as offline
from tp_engine.apps.bench.serving import command as serving
from tp_engine.apps.bench.serving.options import parse_arguments
from tp_engine.config import DEMO_MODEL
from tp_engine.errors import ConfigError

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def times(factor: float, values: list[float]) -> list[float]:
    return [factor * value for value in values]


@pytest.mark.parametrize(
    ("name", "factor", "noise", "verdict"),
    [
        ("output_throughput", 1.0, 1, "passed"), ("output_throughput", 0.97, 1, "passed"),
        ("output_throughput", 0.95, 1, "undecided"), ("output_throughput", 0.9, 1, "failed"),
        ("output_throughput", 1.0, 15, "undecided"), ("output_throughput", 1.3, 15, "passed"),
        ("output_throughput", 0.5, 15, "failed"),
        ("median_ttft_ms", 0.9, 1, "passed"), ("median_ttft_ms", 1.11, 1, "failed"),
        ("C float32, latency, tp_engine TP 1, ms_per_token", 1.5, 1, "failed"), ("rms", 1.5, 1, "passed"),
    ],
)  # fmt: skip
def test_verdicts(name: str, factor: float, noise: float, verdict: str) -> None:
    """Oracle: by hand, with a tolerance of 5 %: five repeats within 1 % tell 0.97 and 0.9 from 0.95, and within 15 %
    neither; a longer time is slower."""
    noisy = [100 + noise * (value - 100) for value in STEADY]
    line = speed_line(name, noisy, times(factor, noisy), 0.05)
    assert line.verdict == verdict, line
    speed = 1 / factor if name.startswith(("median", "C")) else factor
    assert line.numbers["ratio"] == pytest.approx(speed)
    assert line.numbers["low"] < speed < line.numbers["high"]
    if noise > 1 and verdict == "undecided":
        assert re.search(r"the noise of 1\d\.\d% is larger than the tolerance of 5\.0%: .*repeats of both", line.remedy)


def run(**more: Any) -> SpeedRun:
    fields: dict[str, Any] = {"benchmark": "serve", "machine": "m", "model": "x", "options": {"seed": 0}}
    return SpeedRun(**fields | {"figures": {"a": STEADY, "b_ms": STEADY}} | more)


def test_other_machines_models_and_loads_are_named() -> None:
    """Oracle: each field that differs, with both values; the version may."""
    assert differences(run(version="1"), run(version="2")) == []
    other = run(benchmark="offline", machine="n", model="y", options={"seed": 1, "rates": ["inf"]})
    assert differences(run(), other) == [
        "benchmark is 'serve', and was 'offline'", "machine is 'm', and was 'n'", "model is 'x', and was 'y'",
        "seed is 0, and was 1", 'rates is null, and was ["inf"]',
    ]  # fmt: skip
    assert re.fullmatch(r"demo_model [0-9a-f]{12}", name_of_model(DEMO_MODEL)) and name_of_model("a/b") == "a/b"


def gate(*arguments: str) -> SpeedGate | None:
    return SpeedGate.of(parse_arguments(None, arguments))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats", "5"], "give --record or --against"), (["--tolerance", "5%"], "give --record or --against"),
        (["--junit", "x"], "give --record or --against"), (["--force"], "give --against too"),
        (["--record", "b.json", "--repeats", "2"], "at least 3"), (["--against", "/nowhere"], "cannot be read"),
        (["--record", "/proc/none/b.json"], "folder cannot be made"), (["--record", "/tmp"], "is a folder"),
    ],
)  # fmt: skip
def test_orders_that_cannot_work(arguments: list[str], told: str) -> None:
    """Oracle: an error that names the option and the remedy, before anything is measured."""
    with pytest.raises(ConfigError, match=told):
        gate(*arguments)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "--record did not write"), ('{"benchmark": 1}', "--record did not write"),
        ('{"benchmark": "serve", "machine": "m", "model": "x", "options": {}}', "no figures"),
        ('{"benchmark": "serve", "machine": "m", "model": "x", "options": {}, "figures": {"a": [1, 2]}}', "fewer"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_baseline(tmp_path: Path, content: str, told: str) -> None:
    """Oracle: the error names the file and the rule."""
    path = tmp_path / "b.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        read_baseline(str(path))


class Machine:
    """Stands in for a run of a benchmark: ``factor`` times as fast as at first."""

    def __init__(self) -> None:
        self.factor, self.noise, self.failed, self.seeds = 1.0, 0.002, 0, list[int]()

    def serve(self, args: argparse.Namespace) -> dict[str, Any]:
        self.seeds.append(args.seed)
        speed = self.factor * (1 + self.noise * (len(self.seeds) % 5 - 2))
        figures = {"output_throughput": 100 * speed, "median_ttft_ms": 8 / speed, "median_tpot_ms": 0.0}
        return {"results": [{"request_rate": "inf", "failed": self.failed, **figures}]}

    def offline(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        (result,) = self.serve(argparse.Namespace(seed=0))["results"]
        engines = {"tp_engine TP 1": {"tokens_per_s": result["output_throughput"], "share_of_roofline": 0.5}}
        failures = {"tp_engine TP 1": "broke"} if self.failed else {}
        workloads = [{"workload": "throughput", "engines": engines}]
        return [{"shape": "C", "dtype": "float32", "workloads": workloads, "failures": failures}]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(serving, "run_once", made.serve)
    monkeypatch.setattr(offline, "run_cells", made.offline)
    return made


@pytest.mark.parametrize("benchmark", [serving, offline], ids=["serve", "offline"])
def test_a_gate_from_the_first_run_to_the_regression(
    benchmark: Any,
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: a machine of known speed: 0 as fast or faster, 1 slower than the tolerance, 2 with noise, and on another
    machine, where nothing is measured; --force compares there too."""
    baseline, junit, markdown = (str(tmp_path / "out" / name) for name in ("b.json", "junit.xml", "report.md"))
    assert benchmark.main(["--record", baseline]) == 0
    if benchmark is serving:
        assert machine.seeds == [0, 10_000, 20_000, 30_000, 40_000], "a prefix cache would know the prompts"
    against = ["--against", baseline, "--junit", junit, "--markdown", markdown]
    for factor, noise, code in ((1.0, 0.002, 0), (1.2, 0.002, 0), (0.8, 0.002, 1), (1.0, 0.2, 2)):
        machine.factor, machine.noise = factor, noise
        assert benchmark.main(against) == code, capsys.readouterr().out
    assert "larger than the tolerance" in Path(markdown).read_text(encoding="utf-8")
    machine.factor, machine.noise = 0.8, 0.002
    assert benchmark.main([*against, "--tolerance", "30%"]) == 0
    machine.failed = 1
    assert benchmark.main([*against, "--tolerance", "30%"]) == 1
    machine.failed, measured = 0, len(machine.seeds)
    monkeypatch.setattr(benchmark, "processor_name", lambda: "another one")
    capsys.readouterr()
    assert benchmark.main(against) == 2
    assert "machine is 'another one', and was" in capsys.readouterr().out and len(machine.seeds) == measured
    assert benchmark.main([*against, "--force", "--tolerance", "30%"]) == 0
    printed = capsys.readouterr().out
    assert "compared although machine is 'another one'" in printed
    assert json.loads(printed.splitlines()[-1])["exit_code"] == 0


def test_a_server_that_does_not_start_is_no_regression(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: exit code 2."""

    def fail(args: argparse.Namespace) -> dict[str, Any]:
        raise RuntimeError("the server ended with exit code 1")

    monkeypatch.setattr(serving, "run_once", fail)
    assert serving.main(["--record", str(tmp_path / "b.json")]) == 2
