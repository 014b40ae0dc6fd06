"""Host memory, cgroup limits, the CPU device and the memory monitor."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from tests.fake_gpus import FakeGpus
from tests.unit.worker.memory_cases import FakeDevice
from tp_engine.errors import ConfigError
from tp_engine.job.device_map import DeviceMap
from tp_engine.job.topology import RankInfo
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.system.units import MIB
from tp_engine.worker import device
from tp_engine.worker.device import CpuDevice, CudaDevice, MemorySnapshot, make_device
from tp_engine.worker.memory.host_memory import HostMemory, host_memory, process_memory, reset_peak
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape
from tp_engine.worker.memory.meter import MemoryMonitor

GB = 1 << 30
TWO_LAYERS = lay_out([KvKind(window=None, num_kv_heads=4, head_dim=64)] * 2)


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    """A machine with 64 GiB, 40 GiB of them available, and ``files``."""
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
    """Oracle: the numbers in the fake files, in GiB."""
    assert host_memory(fake_root(tmp_path, files)) == HostMemory(total=total * GB, free=free * GB)


def test_process_memory_follows_an_allocation() -> None:
    """Oracle: 64 MiB written, then freed: resident memory rises and falls, the peak stays until it is reset."""
    reset_peak()
    before = process_memory()
    with mmap.mmap(-1, 64 * MIB) as block:  # the heap may have free memory that is resident already
        for _ in range(64):
            block.write(b"x" * MIB)
        during = process_memory()
    after = process_memory()
    assert during.resident - before.resident > 60 * MIB
    assert after.resident < during.resident - 60 * MIB
    assert after.peak >= during.resident - 4 * MIB
    reset_peak()
    assert process_memory().peak <= after.peak


def test_peaks_are_of_the_whole_life_where_they_can_not_be_reset(tmp_path: Path) -> None:
    """Oracle: a kernel that forbids clear_refs gives no error."""
    reset_peak(tmp_path)


def test_cpu_device_is_a_share_of_the_host() -> None:
    """By hand: four local ranks get a quarter each."""
    whole, quarter = CpuDevice(1).snapshot(), CpuDevice(4).snapshot()
    assert quarter.total == whole.total // 4
    assert 0 < quarter.free < quarter.total
    assert quarter.torch_peak >= quarter.torch_allocated > 0
    assert quarter.non_torch == 0


def test_make_device() -> None:
    """Oracle: the CPU device, and a CUDA device of the local rank, whose creation touches no GPU."""
    own, shared = DeviceMap((0, 1)), DeviceMap((3, 3))
    assert make_device("cpu", own, local_rank=1, local_world_size=2).torch_device == torch.device("cpu")
    assert make_device("cuda", own, local_rank=1, local_world_size=2).torch_device == torch.device("cuda", 1)
    assert make_device("cuda", shared, local_rank=1, local_world_size=2).torch_device == torch.device("cuda", 3)


class HostOf:
    """What all ranks report: their kinds."""

    info = RankInfo()

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [kind.encode() for kind in (payload.decode(), *self._kinds)]


def test_devices_of_several_kinds_are_refused() -> None:
    """Oracle: both names in the error; equal devices pass, and this CPU has a name."""
    kind = device.kind_of_device(torch.device("cpu"))
    assert kind
    device.check_kinds(HostOf(kind, kind), kind)
    with pytest.raises(ConfigError, match=r"rank 0 runs on A, 9\.0, and rank 2 on B: .*devices of one kind.*devices,"):
        device.check_kinds(HostOf("A, 9.0", "B"), "A, 9.0")


def test_ranks_on_slices_of_one_gpu_are_named() -> None:
    """Oracle: both ranks and the GPU's place in the error; GPUs of two hosts, or CPUs, are different."""
    device.check_places(HostOf("beta, 0000:3b:00"), "alpha, 0000:3b:00")
    device.check_places(HostOf(""), "")
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 are on one GPU \(alpha, 0000:3b:00\).*MIG"):
        device.check_places(HostOf("alpha, 0000:3b:00"), "alpha, 0000:3b:00")
    device.check_devices(HostOf(), torch.device("cpu"), may_share=False)


def test_a_driver_that_says_nothing() -> None:
    """Oracle: no figure without the library, or for a GPU that it does not know."""
    assert device.process_bytes("GPU-00000000-0000-0000-0000-000000000000") is None


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(1, 5 * GB), (os.getpid(), 3 * GB)], 3 * GB),
        ([(1, 5 * GB)], None),
        ([], None),
        ([(os.getpid(), 2**64 - 1)], None),
    ],
    ids=["both", "only the other", "none", "not available"],
)
def test_own_bytes_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int]], expected: int | None
) -> None:
    """Oracle: the driver's list; None if it does not list this process, or has no figure."""
    FakeGpus(processes=processes).install(monkeypatch)
    assert device.process_bytes("1234") == device.process_bytes("GPU-1234") == expected
    assert device.process_bytes("5678") is None


@pytest.mark.parametrize(
    ("own", "num_sharing", "non_torch"),
    [(12, 1, 2), (None, 1, 20), (12, 2, 2), (None, 2, 5), pytest.param(9, 1, 20, id="less than torch holds"),
     pytest.param(31, 1, 20, id="more than is used")],
)  # fmt: skip
def test_cuda_snapshot(monkeypatch: pytest.MonkeyPatch, own: int | None, num_sharing: int, non_torch: int) -> None:
    """Oracle: non-torch memory is this process's own where the driver reports it, else all that torch does not hold;
    a figure that cannot be this process's is another's, with the same pid on the host as this one in its container.

    Two ranks on one GPU have half of it each; without the driver's report also half of its 30 GiB in use.
    """
    processes = None if own is None else [(os.getpid(), own * GB)]
    FakeGpus(processes=processes, reserved=10 * GB, allocated=8 * GB, peak=9 * GB).install(monkeypatch)
    assert CudaDevice(0, 2, num_sharing).snapshot() == MemorySnapshot(
        total=80 * GB // num_sharing,
        free=50 * GB // num_sharing,
        torch_allocated=8 * GB,
        torch_reserved=10 * GB,
        torch_peak=9 * GB,
        non_torch=non_torch * GB,
    )


@pytest.mark.parametrize(("available", "free"), [(70, 70), (20, 50), (100, 80)])
def test_page_cache_of_a_gpu_without_own_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, available: int, free: int
) -> None:
    """Oracle: the kernel's MemAvailable where it is more than the driver's figure, up to the GPU's total of 80 GiB."""
    FakeGpus(is_integrated=True).install(monkeypatch)
    monkeypatch.setattr(device, "host_memory", lambda: HostMemory(total=128 * GB, free=available * GB))
    found = CudaDevice(0, 1).snapshot()
    assert found.free == free * GB and found.non_torch == (80 - free) * GB


def test_idle_memory_of_graphs_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: 50 GiB of the device, and 3 that torch holds for anybody; not graphs' pools, nor other GPUs."""
    segments = [
        {"device": where, "segment_pool_id": pool, "total_size": 8 * GB, "allocated_size": 5 * GB}
        for where, pool in [(0, (0, 0)), (0, (0, 1)), (1, (0, 0))]
    ]
    FakeGpus(segments=segments).install(monkeypatch)
    assert CudaDevice(0, 1).free_bytes() == 53 * GB


def test_monitor_counts_what_the_process_gained() -> None:
    """Oracle: the fake process's allocations; the co-tenant's do not count."""
    fake = FakeDevice()
    monitor = MemoryMonitor(fake, torch.empty(0))
    fake.co_tenant += GB
    assert monitor.growth() == 0
    fake.allocate(5)
    fake.non_torch += 2
    assert monitor.growth() == 7


def test_monitor_leaves_out_pages_of_a_cpu_cache() -> None:
    """Oracle: a used cache of 64 MiB enlarges the process's memory, but not the monitor's figure."""
    shape = KvCacheShape(layout=TWO_LAYERS, block_size=16, dtype=torch.float32)
    blocks = KvBlocks.allocate(shape, 64 * MIB // shape.block_bytes, torch.device("cpu"))
    monitor = MemoryMonitor(CpuDevice(1), blocks.raw)
    before = process_memory().resident
    blocks.raw.fill_(1)
    assert process_memory().resident - before > 60 * MIB
    assert abs(monitor.growth()) < 4 * MIB


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("local_world_size", "expected"), [(1, 7), (2, 4), (3, 2), (64, 1)])
def test_ranks_of_one_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, device_type: str, local_world_size: int, expected: int
) -> None:
    """Oracle: eight cores divided by the ranks; a lone rank keeps the number of threads that its user chose."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr("tp_engine.system.cpus.cpu_quota", lambda _root: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    FakeGpus(local_world_size).install(monkeypatch)
    torch.set_num_threads(7)
    devices = DeviceMap(tuple(range(local_world_size)))
    make_device(device_type, devices, local_rank=0, local_world_size=local_world_size).set_current()
    assert torch.get_num_threads() == expected
