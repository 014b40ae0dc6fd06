"""Plots of benchmarks: the file that is drawn from known figures, and wrong values of the options."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tp_engine.apps.bench import plot
from tp_engine.apps.bench.serving.options import parse_arguments


def result(rate: float | str, load: float, latency: float, **changes: Any) -> dict[str, Any]:
    """What ``vllm bench serve --save-result`` writes about one rate, as far as the plot reads it."""
    latencies = {f"{kind}_{name}_ms": latency for kind in ("median", "p99") for name in ("ttft", "tpot")}
    return {
        "request_rate": rate,
        "request_throughput": load,
        "output_throughput": load * 100,
        "completed": 9,
        **latencies,
        **changes,
    }


def texts(path: Path) -> list[str]:
    """The texts of an SVG file, which must be well-formed."""
    return [node.text or "" for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.slow
def test_curves_over_load(tmp_path: Path) -> None:
    """Oracle: one curve of medians and one of p99 per run, a panel per figure; equal figures give equal bytes; a rate
    without a completed request has no point."""
    ours = [result(4, 3.9, 20.0), result(1, 1.0, 10.0), result("inf", 5.0, 90.0)]
    folder = tmp_path / "vllm"
    folder.mkdir()
    for rate in (1, 4):
        (folder / f"rate-{rate}.json").write_text(json.dumps(result(rate, rate * 0.9, 30.0)))
    (folder / "other.json").write_text("[1]")
    runs = {"tp_engine": [*ours, result(9, 0.0, 0.0, completed=0)], **dict([plot.earlier_run(f"vllm={folder}")])}
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in files:
        plot.plot_over_load(runs, "demo on a machine", path)
    found = texts(files[0])
    for title in ("time to first token, ms", "time per output token, ms", "output tokens/s", "demo on a machine"):
        assert found.count(title) == 1
    assert found.count("tp_engine, p50") == found.count("vllm, p99") == 2 and found.count("vllm") == 1
    assert found.count("completed requests/s") == 3
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bars_of_engines(tmp_path: Path) -> None:
    """Oracle: both engines in the legend, the figures on their bars; time per token for the workload that has it."""
    results = [
        {"workload": "latency", "engines": {"tp_engine": {"tokens_per_s": 31.5, "ms_per_token": 4.25}}},
        {"workload": "batch32", "engines": {"tp_engine": {"tokens_per_s": 710.0}, "vllm": {"tokens_per_s": 480.0}}},
    ]
    plot.plot_workloads(results, "shape B", tmp_path / "bars.svg")
    found = texts(tmp_path / "bars.svg")
    assert {"tp_engine", "vllm", "latency", "batch32", "31.5", "4.25", "710", "480"} <= set(found)
    plot.plot_workloads(results, "shape B", tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plot", "load.jpg"], "must end in .svg or .png"),
        (["--plot", "no/such/folder/load.svg"], "there is no folder"),
        (["--plot-beside", "vllm"], "give NAME=FOLDER"),
        (["--plot-beside", "vllm=no/such/folder"], "give NAME=FOLDER"),
    ],
)
def test_wrong_options(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a message with the value and the rule, before anything is measured."""
    with pytest.raises(SystemExit):
        parse_arguments("", arguments)
    assert told in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message names the extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install 'tp-engine\[bench\]'"):
        plot.plot_file("load.svg")
