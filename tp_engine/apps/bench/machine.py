"""Measurements of the machine's rates, which benchmarks print beside their figures."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_REPEATS = 10
_LONG_S = 0.002  # of a size that a GPU does in 0.1 ms, and a host that stands in for one in 10


def processor_name() -> str:
    """The processor or GPU that the benchmark ran on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores"
    return platform.processor()


def read_bandwidth(num_bytes: int = 1 << 30, repeats: int = 7) -> float:
    """Bytes per second at which torch's threads read a large tensor (a sum in fp32); the best of several."""
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device="cpu")
    return num_bytes / _best_seconds(values.sum, repeats)


def cpu_matmul_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 40) -> float:
    """Floating-point operations per second of a square matrix product with torch's threads; the best of several."""
    left, right = torch.randn(2, size, size, dtype=torch.float32, device="cpu").to(dtype)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right), repeats)


def _best_seconds(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def copy_bandwidth() -> float:
    """Bytes per second (read plus written) of a large copy within the GPU, whose two sides take at most half of what is
    free; the mean of several."""

    def copy(num_bytes: int) -> Callable[[], object]:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    free, _ = torch.cuda.mem_get_info()
    num_bytes, seconds = _of_large_work(copy, (1 << 26, max(1 << 26, min(1 << 32, free // 4))))
    return 2 * num_bytes / seconds


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square matrix product on the GPU; the mean of several."""

    def product(size: int) -> Callable[[], object]:
        left, right = torch.randn(2, size, size, device="cuda", dtype=torch.float32).to(dtype)
        return lambda: torch.mm(left, right)

    size, seconds = _of_large_work(product, (1024, 8192))
    return 2 * size**3 / seconds


def _of_large_work(make: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> tuple[int, float]:
    """The seconds of work on a GPU, and the size they are of: the largest, unless a smaller one takes long already."""
    for size in sizes:
        run = make(size)
        run()  # libraries start
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if time.perf_counter() - began_s > _LONG_S:
            break
    for _ in range(3):
        run()

    def run_all() -> None:
        for _ in range(_REPEATS):
            run()

    return size, seconds_on_gpu(run_all) / _REPEATS


def seconds_on_gpu(run: Callable[[], object]) -> float:
    """Seconds that the GPU takes for the work that ``run`` launches on the current stream."""
    begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
