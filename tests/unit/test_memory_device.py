"""Host memory, cgroup limits, the CPU device and the memory monitor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.memory_cases import FakeDevice
from tp_engine.units import MIB
from tp_engine.worker.device import CpuDevice, make_device
from tp_engine.worker.host_memory import HostMemory, host_memory, process_memory, reset_peak
from tp_engine.worker.kv_cache import KvCacheShape, allocate_kv_cache
from tp_engine.worker.memory import MemoryMonitor
from tp_engine.worker.nvml import process_bytes

GB = 1 << 30


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    """A machine with 64 GiB, 40 GiB available, and ``files``."""
    machine = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\nHugePages: 0\n"}
    for name, text in (machine | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def v1(limit: int, used: int, cache: int, path: str = "") -> dict[str, str]:
    """One cgroup of version 1."""
    folder = f"sys/fs/cgroup/memory/{path}"
    return {
        f"{folder}memory.limit_in_bytes": f"{limit}\n",
        f"{folder}memory.usage_in_bytes": f"{used}\n",
        f"{folder}memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}\n",
    }


def v2(limit: str, used: int, cache: int, path: str) -> dict[str, str]:
    """One cgroup of version 2."""
    folder = f"sys/fs/cgroup/{path}"
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 64, 40),
        ({"proc/self/cgroup": "0::/\n"}, 64, 40),
        ({"proc/self/cgroup": "0::/a/b\n"} | v2("max", GB, 0, "a/b/") | v2(str(8 * GB), 5 * GB, GB, "a/"), 8, 4),
        ({"proc/self/cgroup": "0::/a\n"} | v2(str(8 * GB), 9 * GB, 0, "a/"), 8, 0),
        ({"proc/self/cgroup": "9:cpu:/x\n4:memory:/x\n"} | v1(6 * GB, 2 * GB, GB, "x/"), 6, 5),
        ({"proc/self/cgroup": "4:cpu,memory:/on/the/host\n"} | v1(6 * GB, 2 * GB, 0), 6, 4),
        ({"proc/self/cgroup": "4:memory:/\n"} | v1(2**63 - 4096, 60 * GB, 0), 64, 40),
    ],
    ids=["no cgroup", "no limit", "v2 parent", "v2 over its limit", "v1", "v1 in a container", "v1 no limit"],
)
def test_host_memory(tmp_path: Path, files: dict[str, str], total: int, free: int) -> None:
    """Oracle: the numbers that the fake files say, in GiB."""
    assert host_memory(fake_root(tmp_path, files)) == HostMemory(total=total * GB, free=free * GB)


def test_process_memory_follows_an_allocation() -> None:
    """Oracle: 64 MiB that are written, then freed: resident goes up and down, the peak stays until it is reset."""
    reset_peak()
    before = process_memory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    during = process_memory()
    del block
    after = process_memory()
    assert during.resident - before.resident > 60 * MIB
    assert after.resident < during.resident - 60 * MIB
    assert after.peak >= during.resident - 4 * MIB
    reset_peak()
    assert process_memory().peak <= after.peak


def test_peaks_are_of_the_whole_life_where_they_can_not_be_reset(tmp_path: Path) -> None:
    """A kernel that forbids clear_refs is no error."""
    reset_peak(tmp_path)


def test_cpu_device_is_a_share_of_the_host() -> None:
    """Four local ranks get a quarter each."""
    whole, quarter = CpuDevice(1).snapshot(), CpuDevice(4).snapshot()
    assert quarter.total == whole.total // 4
    assert 0 < quarter.free < quarter.total
    assert quarter.torch_peak >= quarter.torch_allocated > 0
    assert quarter.non_torch == 0


def test_make_device() -> None:
    """The CPU device, and a CUDA device of the local rank, which touches no GPU yet."""
    assert make_device("cpu", local_rank=1, local_world_size=2).torch_device == torch.device("cpu")
    assert make_device("cuda", local_rank=1, local_world_size=2).torch_device == torch.device("cuda", 1)


def test_a_driver_that_says_nothing() -> None:
    """Without the library, or for a GPU that it does not know, there is no figure."""
    assert process_bytes("GPU-00000000-0000-0000-0000-000000000000") is None


def test_monitor_counts_what_the_process_gained() -> None:
    """Oracle: the fake process's allocations; the co-tenant's do not count."""
    device = FakeDevice()
    monitor = MemoryMonitor(device, torch.empty(0))
    device.co_tenant += GB
    assert monitor.growth() == 0
    device.allocate(5)
    device.non_torch += 2
    assert monitor.growth() == 7


def test_monitor_leaves_out_pages_of_a_cpu_cache() -> None:
    """A cache of 64 MiB comes into use: the process's memory grows by it, the monitor's figure does not."""
    shape = KvCacheShape(num_layers=2, block_size=16, local_num_kv_heads=4, head_dim=64, dtype=torch.float32)
    cache = allocate_kv_cache(shape, 64 * MIB // shape.block_bytes, torch.device("cpu"))
    monitor = MemoryMonitor(CpuDevice(1), cache)
    before = process_memory().resident
    cache.fill_(1.0)
    assert process_memory().resident - before > 60 * MIB
    assert abs(monitor.growth()) < 4 * MIB
