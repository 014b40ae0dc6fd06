"""The kernel benchmark's arithmetic, which needs no GPU, and its message without one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_kernels")


def test_bytes_are_counted_by_hand(bench: Any) -> None:
    """Oracle: the tensors of a small layer, written out: 3 tokens, 8 wide, 2 heads and 1 KV head of 4, 2 bytes each."""
    cases, attention = sys.modules["benchmarks.kernels.cases"], importlib.import_module("benchmarks.kernels.attention")
    shape = cases.Shape(name="tiny", hidden=8, inner=10, num_heads=2, num_kv_heads=1, head_dim=4)
    assert cases.norm_bytes(shape, 3, adds=False) == 2 * (3 * 8 + 3 * 8 + 8)
    assert cases.norm_bytes(shape, 3, adds=True) == 2 * (4 * 3 * 8 + 8)
    assert cases.silu_bytes(shape, 3) == 2 * 3 * (20 + 10)
    merged, angles, queries, positions_and_slots = 3 * 4 * 4 * 2, 3 * 4 * 2, 3 * 2 * 4 * 2, 3 * 16
    kept = 3 * 2 * 4
    assert cases.heads_bytes(shape, 3, torch.bfloat16) == merged + angles + queries + positions_and_slots + kept * 2
    scales = 3 * 2 * 4
    assert cases.heads_bytes(shape, 3, torch.int8) == merged + angles + queries + positions_and_slots + kept + scales
    keys_and_values, tables, states = 2 * 17 * 2 * 4, 2 * 2 * 4, 2 * 2 * (2 * 4 * 2)
    assert attention.decode_bytes(shape, 2, 17, torch.bfloat16) == keys_and_values * 2 + tables + states
    assert attention.decode_bytes(shape, 2, 17, torch.int8) == keys_and_values + 2 * 17 * 2 * 4 + tables + states
    assert cases.decode_inputs_bytes(shape, 2, 17) == 2 * (4 + 4 + 4 + 4 + 8 + 8 + 4) + 2 * tables
    assert attention.latent_bytes(shape, 3, 2, 17) == 2 * 17 * 576 * 2 + tables + 2 * 3 * (576 + 512) * 2
    assert attention.prefill_flops(shape, 3) == 2 * 2 * (2 * 4) * (1 + 2 + 3)


def test_a_row_of_the_table(bench: Any) -> None:
    """Oracle: 1 GB in 1 ms is 1000 GB/s, half of a copy's 2000 GB/s; 32 sets of it exceed any cache."""
    case = sys.modules["benchmarks.kernels.cases"].KernelCase(
        kernel="k", size="s", num_bytes=10**9, make=lambda: lambda: None
    )
    row = bench.row_of(case, 1e-3, bench.Ceilings(2e12, 1e15), num_sets=32, l2_bytes=50 * 2**20)
    figures = {"bytes": 10**9, "us": 1000.0, "gb_per_s": 1000.0, "share_of_copy": 0.5, "warm": False}
    assert row == {"kernel": "k", "size": "s"} | figures
    row = bench.row_of(replace(case, num_flops=2 * 10**11), 1e-3, bench.Ceilings(2e12, 1e15), num_sets=1, l2_bytes=1)
    assert (row["tflop_per_s"], row["share_of_matmul"]) == (200.0, 0.2)
    figures = importlib.import_module("gpu.figures").figures_of
    shown = figures({"benchmark": "kernels", "copy_gb_per_s": 2000.0, "results": [row]})
    assert [(figure.value, figure.unit) for figure in shown] == [(2000.0, "GB/s"), (0.2, "of matrix products")]


def test_number_of_sets(bench: Any) -> None:
    """Oracle: four caches of 50 kB divided by the bytes of one set, at least 1, at most 128."""
    assert [bench.number_of_sets(num_bytes, 50_000) for num_bytes in (1, 4_000, 200_000, 10**9)] == [128, 50, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """Oracle: exit status 2 and a message that says what is missing; --help works everywhere."""
    run = [sys.executable, str(SCRIPTS / "bench_kernels.py")]
    refused = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "no CUDA GPU" in refused.stderr and not refused.stdout
    helped = subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert helped.returncode == 0 and "--shape" in helped.stdout
