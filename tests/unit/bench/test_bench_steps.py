"""The step benchmark: idle time from a profiler's trace, and a run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_steps import device_figures, device_kernels, idle_intervals
from gpu.figures import figures_of

ROOT = Path(__file__).parents[3]


def event(begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "ts": begin, "dur": duration}


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ([], []),
        ([(0, 5)], []),
        ([(0, 5), (5, 6)], []),
        ([(7, 9), (0, 5), (3, 6)], [1]),
        ([(0, 10), (2, 3), (12, 13), (13.5, 14)], [2, 0.5]),
    ],
)
def test_idle_time_is_what_no_interval_covers(busy: list[tuple[float, float]], expected: list[float]) -> None:
    """Oracle: drawn by hand: overlapping, nested and touching intervals."""
    assert idle_intervals(busy) == expected


def test_figures_of_a_trace() -> None:
    """Oracle: three steps of 100 us, 30 us between steps, 2 us between kernels; the host's events do not count."""
    events = [event(0, 1000, "cpu_op"), {"ph": "M"}]
    for step in range(3):
        events += [event(130 * step, 49), event(130 * step + 51, 49, "gpu_memcpy")]
    assert device_figures(events, 3) == {
        "device_busy_us_per_step": 98.0,
        "device_idle_us_per_step": round((2 * 30 + 3 * 2) / 3, 1),
        "gap_us_median": 30.0,
        "gap_us_max": 30.0,
        "device_events_per_step": 2.0,
    }
    assert device_figures([event(0, 10)], 3) == {}


def test_device_kernels() -> None:
    """Oracle: by hand: two steps of 100 us; kernels below a hundredth of a step are summed up."""
    names = (("attention", 0, 30), ("product", 30, 10), ("attention", 50, 30), ("small", 90, 1))
    events = [event(start, length) | {"name": name} for name, start, length in names]
    assert device_kernels(events, 2, 100.0) == {"attention": 30.0, "product": 5.0, "other": 0.5}


def test_a_run_on_the_cpu() -> None:
    """Oracle: the requested requests and steps; the period follows from the tokens per second."""
    command = [sys.executable, "scripts/bench_steps.py", "--shape", "C", "--dtype", "float32", "--steps", "4"]
    command += ["--batch-size", "3", "--context-len", "20", "--engine-options", '{"num_gpu_blocks_override": 64}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["batch_size"] == 3 and report["step_ms"] > 0 and "gap_us_median" not in report
    assert list(report["kernels_us"])[-1] == "other" and min(report["kernels_us"].values()) >= 0
    assert {figure.unit for figure in figures_of(report)} == {"ms/step", "of the roofline"}
    assert report["tokens_per_s"] == pytest.approx(3 / report["step_ms"] * 1e3, rel=0.01)
