"""``scripts/bench_few_rows.py``: its products, launched once, and what it concludes from times."""

from __future__ import annotations

import bench_few_rows
import pytest
import torch
from gpu.figures import figures_of

from tests.unit.kernels.kernel_harness import interpreted, needs_triton

TIMES = (("qkv", 8, "triton", 4.0), ("qkv", 8, "library", 8.0), ("qkv", 64, "triton", 9.0), ("qkv", 64, "library", 8.5))
RESULTS = [{"layer": layer, "rows": rows, "sizes": sizes, "us": us} for layer, rows, sizes, us in TIMES]


@needs_triton
def test_every_launch_works() -> None:
    """Oracle: both ways write the same to within rounding; the cases' own check."""
    interpreted("kernel_cases_bench_few_rows")


def test_rows_for_which_triton_is_faster() -> None:
    """Oracle: by hand; a kernel that failed has no time, and counts as slower."""
    failed = {"layer": "qkv", "rows": 16, "sizes": "triton", "error": "OutOfResources"}
    assert bench_few_rows.faster_rows([*RESULTS, failed]) == [8]


def test_figures() -> None:
    """Oracle: by hand."""
    found = figures_of({"benchmark": "few_rows", "shape": "qwen3-8b", "results": RESULTS})
    assert [(figure.value, figure.unit) for figure in found] == [
        (4.0, "us"),
        (2.0, "times the library"),
        (9.0, "us"),
        (8.5 / 9.0, "times the library"),
    ]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 2 and the reason."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench_few_rows.main([]) == 2 and "no CUDA GPU" in capsys.readouterr().err
