"""The benchmark of the start, and the figures of single steps: arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_engine.apps.bench import steps
from tp_engine.apps.bench.startup.command import parse_arguments, run_rounds, summarise
from tp_engine.apps.bench.startup.starts import Start
from tp_engine.apps.bench.steps import device_figures


def start(first_token_s: float, **within: float) -> Start:
    marks = {"interpreter": 0.5, "ready": first_token_s - 0.5, "first token": first_token_s}
    return Start(marks=marks, cpu_s=1.0, within=within)


def test_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: by hand: the first round does not count, vLLM takes 12 s to our 3; a failure is kept."""
    seconds = iter((9.0, 3.0, 1.0, 5.0))

    def bad() -> Start:
        raise RuntimeError("no memory")

    makers = {
        "tp_engine LLM TP 1": lambda: start(next(seconds), weights=1.0),
        "bad": bad,
        "vllm 1": lambda: start(12.0),
    }
    starts, failures = run_rounds(makers, 3)
    own, peer = summarise(starts)
    assert own["first_token_s"] == 3.0 and own["ratio"] == 4.0 and own["within"] == {"weights": 1.0}
    assert own["phases"] == {"interpreter": 0.5, "ready": 2.0, "first token": 0.5}
    assert peer["ratio"] == 1.0 and failures == {"bad": "no memory"}
    assert capsys.readouterr().err.count("bad failed: no memory") == 1
    assert parse_arguments(["--tensor-parallel-size", "1,2"]).sizes == [1, 2]


def event(begin: float, duration: float, **others: object) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "ts": begin, "dur": duration, **others}


def test_figures_of_a_trace() -> None:
    """Oracle: by hand: three steps of 100 us, 30 us between steps, 2 us between kernels; the host's do not count.  Of
    the kernels' times, those below a hundredth of the period are together."""
    events = [event(0, 1000, cat="cpu_op"), {"ph": "M"}]
    for step in range(3):
        events += [event(130 * step, 49, name="product"), event(130 * step + 51, 49, cat="gpu_memcpy", name="copy")]
    assert device_figures(events, 3, 100.0) == {
        "device_busy_us_per_step": 98.0,
        "device_idle_us_per_step": round((2 * 30 + 3 * 2) / 3, 1),
        "gap_us_median": 30.0,
        "gap_us_max": 30.0,
        "device_events_per_step": 2.0,
        "kernels_us": {"product": 49.0, "copy": 49.0, "other": 0.0},
    }
    names = (("attention", 0, 30), ("product", 30, 10), ("attention", 50, 30), ("small", 90, 1))
    events = [event(begin, length, name=name) for name, begin, length in names]
    found = device_figures(events, 2, 100.0)["kernels_us"]
    assert found == {"attention": 30.0, "product": 5.0, "other": 0.5}
    alone = device_figures([event(7, 40, name="all")], 2, 100.0)
    assert alone["gap_us_max"] == 0.0 and alone["device_busy_us_per_step"] == 20.0 and device_figures([], 2, 1.0) == {}


def test_figures_of_the_profiler_s_file() -> None:
    """Oracle: by hand, from a file in the layout that torch's profiler writes on a GPU: two replays and what is
    launched beside them.  Only kernels and copies count; the second kernel begins early, so that is no gap."""
    trace = json.loads((Path(__file__).parent / "kineto_trace.json").read_text())
    product = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"
    idle = 10 + 2 + 1 + 2  # behind the upload, and before the second product, the fill and the read-back
    assert device_figures(trace["traceEvents"], 2, 500.0) == {
        "device_busy_us_per_step": 236.5 - idle,
        "device_idle_us_per_step": round(idle + (500 - 236.5) / 2, 1),
        "gap_us_median": 500 - 236.5,
        "gap_us_max": 500 - 236.5,
        "device_events_per_step": 6.0,
        "kernels_us": {product: 118.0, "_paged_decode_kernel": 102.0, "other": 3.5},
    }
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >"
    assert fill[:80] in device_figures(trace["traceEvents"], 2, 50.0)["kernels_us"]


class NoProfiler:
    """A profiler whose file has ``content``, or that does not start."""

    def __init__(self, content: str) -> None:
        self._content = content

    def __enter__(self) -> NoProfiler:
        if not self._content:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(self._content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"),
        ("{", "JSONDecodeError"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "ts": 1, "dur": 1, "name": "x"}]}',
            "saw no work of the GPU",
        ),
    ],
    ids=["does not start", "half a file", "sees nothing"],
)
def test_a_profiler_that_gives_nothing(content: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the reason in the place of the times; the benchmark goes on."""

    class Nothing:
        def run(self, num_steps: int) -> float:
            return 1.0

    monkeypatch.setattr(steps, "profile", lambda **_: NoProfiler(content))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = steps._profile_gpu(Nothing(), 2, 100.0)  # type: ignore[arg-type]
    assert found.keys() == {"not_profiled"} and reason in found["not_profiled"]
