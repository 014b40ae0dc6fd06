"""Benchmarks that run in the test's process measure the machine's rates briefly."""

from __future__ import annotations

from functools import partial

import pytest

from tp_engine.apps.bench.machine import cpu_matmul_rate, read_bandwidth
from tp_engine.apps.bench.offline import command as bench_offline


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of small tensors, a few times; their values do not matter to a test."""
    monkeypatch.setattr(bench_offline, "read_bandwidth", partial(read_bandwidth, 1 << 20, 2))
    monkeypatch.setattr(bench_offline, "cpu_matmul_rate", partial(cpu_matmul_rate, size=128, repeats=2))
