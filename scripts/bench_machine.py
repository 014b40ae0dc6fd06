"""What the machine can do: the ceilings that benchmarks print beside their figures."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch


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
    values = torch.ones(num_bytes // 4)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return num_bytes / best
