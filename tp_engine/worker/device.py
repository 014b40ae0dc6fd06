"""The device interface: what the engine needs from a GPU or a CPU beyond tensor operations."""

import ctypes
import functools
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tp_engine.cpu import kernel_level, watched_waiting
from tp_engine.distributed.device_threads import use_device
from tp_engine.distributed.rank import Agreeing
from tp_engine.errors import ConfigError
from tp_engine.job.device_map import DeviceMap
from tp_engine.system.cpus import threads_of_rank
from tp_engine.system.heap import trim_heap
from tp_engine.worker.memory.host_memory import host_memory, process_memory, reset_peak
from tp_engine.worker.results.readback import Check, never_fails, record_event, wait_for

_SUCCESS = 0
_CLOCKS = {"units": 1, "memory": 2}  # nvmlClockType_t: SM, memory
_MAX_PROCESSES = 1024
_NOT_AVAILABLE = (1 << 64) - 1
_POOL_OF_ALL = (0, 0)  # other pools of torch serve the graphs that were captured into them


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Device memory at one moment, in bytes.

    ``torch_allocated``, ``torch_reserved`` and ``torch_peak`` (of allocated, since ``reset_peak``) are this process's;
    so is ``non_torch``: context, NCCL buffers, kernels.  ``free`` is what all processes together leave.
    """

    total: int
    free: int
    torch_allocated: int
    torch_reserved: int
    torch_peak: int
    non_torch: int


class Device:
    """One rank's device; ``local_world_size`` ranks share its host.  What only a GPU needs does nothing here."""

    type: str
    torch_device: torch.device

    def __init__(self, local_world_size: int) -> None:
        self._local_world_size = local_world_size

    @property
    def description(self) -> str:
        """What it is, as an operator finds it."""
        raise NotImplementedError  # each kind of device has its own

    def snapshot(self) -> MemorySnapshot:
        """Memory now, after all launched work."""
        raise NotImplementedError  # each kind of device has its own

    def free_bytes(self) -> int:
        """Bytes that this process may still take."""
        return self.snapshot().free

    def reset_peak(self) -> None:
        """Restart ``torch_peak``."""

    def synchronize(self) -> None:
        """Wait for all launched work; operations on a CPU have ended when they return."""

    def empty_cache(self) -> None:
        """Give memory that torch holds but does not use back to the device."""

    def set_current(self) -> None:
        """Make this the device of the calling thread, and let torch use this rank's share of the host's cores, which is
        ``threads_of_rank``."""
        use_device(self.torch_device)
        torch.set_num_threads(threads_of_rank(torch.get_num_threads(), self._local_world_size))

    def enter_thread(self) -> None:
        """Make this the device of the calling thread unless it is already."""

    def shared_cores(self) -> AbstractContextManager[None]:
        """While it is open, the threads of this process give way where other programs need their cores."""
        return nullcontext()


class CudaDevice(Device):
    """The GPU ``index``, or an equal share of its memory if ``num_sharing`` ranks run on it.

    ``non_torch`` counts this process only, if the driver reports the memory of each process.  If not (in some
    containers), it counts all memory of the GPU that torch does not hold, so a change by another process during the
    measurement counts as this one's; ``kv_cache_memory_bytes`` and ``num_gpu_blocks_override`` avoid that.  Ranks that
    share the GPU are alike, so each then counts an equal part.  A GPU without memory of its own (GB10, Jetson) uses the
    host's, and the driver counts the page cache of the weights' files as used; the kernel gives it back when asked.
    ``check`` raises if another rank has ended, whose part of a collective the GPU may wait for.
    """

    type = "cuda"

    def __init__(self, index: int, local_world_size: int, num_sharing: int = 1, check: Check = never_fails) -> None:
        super().__init__(local_world_size)
        self.torch_device = torch.device("cuda", index)
        self._check, self._num_sharing = check, num_sharing

    @property
    def description(self) -> str:
        found = self._properties
        return f"GPU {self.torch_device.index} ({found.name}, {found.uuid}, bus {bus_place(self.torch_device)})"

    @property
    def _properties(self) -> Any:  # torch's type has not all of its attributes
        return torch.cuda.get_device_properties(self.torch_device)

    def snapshot(self) -> MemorySnapshot:
        self.synchronize()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if self._properties.is_integrated:
            free = min(max(free, host_memory().free), total)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        own = process_bytes(str(self._properties.uuid))
        if own is not None and not reserved <= own <= total - free:  # in a container its pid may be another's
            own = None
        return MemorySnapshot(
            total=total // self._num_sharing,
            free=free // self._num_sharing,
            torch_allocated=torch.cuda.memory_allocated(self.torch_device),
            torch_reserved=reserved,
            torch_peak=torch.cuda.max_memory_allocated(self.torch_device),
            non_torch=((total - free) // self._num_sharing if own is None else own) - reserved,
        )

    def free_bytes(self) -> int:
        idle: int = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.torch_device.index and segment["segment_pool_id"] == _POOL_OF_ALL
        )
        return super().free_bytes() + idle

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        wait_for(record_event(), self._check)
        torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def enter_thread(self) -> None:
        if torch.cuda.current_device() != self.torch_device.index:
            use_device(self.torch_device)


class CpuDevice(Device):
    """This rank's equal share of the host's memory, or of its container's.

    Torch does not count its allocations on CPU, so the process's resident memory stands for ``torch_allocated`` and
    ``torch_reserved``, its high-water mark for ``torch_peak``, and ``non_torch`` is 0.
    """

    type = "cpu"
    torch_device = torch.device("cpu")

    @property
    def description(self) -> str:
        return f"CPU ({kind_of_device(self.torch_device)})"

    def snapshot(self) -> MemorySnapshot:
        host, process = host_memory(), process_memory()
        return MemorySnapshot(
            total=host.total // self._local_world_size,
            free=host.free // self._local_world_size,
            torch_allocated=process.resident,
            torch_reserved=process.resident,
            torch_peak=process.peak,
            non_torch=0,
        )

    def reset_peak(self) -> None:
        reset_peak()

    def empty_cache(self) -> None:
        """Give freed memory back to the system: glibc keeps some, which would count as resident."""
        trim_heap()

    def shared_cores(self) -> AbstractContextManager[None]:
        return watched_waiting()


def make_device(
    device_type: str, devices: DeviceMap, *, local_rank: int, local_world_size: int, check: Check = never_fails
) -> Device:
    """Return the device of a rank: ``device_type`` is ``cuda`` or ``cpu``; ``devices`` says which GPU; ``check`` as
    there."""
    if device_type == "cpu":
        return CpuDevice(local_world_size)
    return CudaDevice(devices.indices[local_rank], local_world_size, devices.num_sharing(local_rank), check)


def kind_of_device(device: torch.device) -> str:
    """Return the hardware of ``device`` as text: devices of one kind compute the same bits.  A GPU without an index is
    the current one.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    kernels = kernel_level()
    chosen = "PyTorch's kernels" if kernels is None else f"kernels {kernels}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {chosen}"


def check_kinds(host: Agreeing, kind: str) -> None:
    """``ConfigError`` on all ranks if their devices are not all of one ``kind``.  A collective.

    Each rank decides by itself which token was sampled, and only equal devices decide from equal bits.
    """
    kinds = [report.decode() for report in host.all_gather_bytes(kind.encode())]
    other = next((rank for rank, found in enumerate(kinds) if found != kinds[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank 0 runs on {kinds[0]}, and rank {other} on {kinds[other]}: ranks sample alike only on devices of one "
            "kind; choose equal ones (devices, or CUDA_VISIBLE_DEVICES)"
        )


def check_devices(host: Agreeing, device: torch.device, *, may_share: bool) -> None:
    """``ConfigError`` on all ranks if their devices cannot work together; see the two checks.  A collective."""
    check_kinds(host, kind_of_device(device))
    check_places(host, "" if device.type != "cuda" or may_share else f"{platform.node()}, {bus_place(device)}")


def check_places(host: Agreeing, place: str) -> None:
    """``ConfigError`` on all ranks if two have one ``place``, the host and the GPU; empty if it does not matter.

    NCCL knows a GPU by its place on the bus, and takes one rank on each; slices of one GPU (MIG) have one place.
    """
    places = [report.decode() for report in host.all_gather_bytes(place.encode())]
    for rank, found in enumerate(places):
        if found and places.index(found) != rank:
            raise ConfigError(
                f"ranks {places.index(found)} and {rank} are on one GPU ({found}), and NCCL takes one rank on each; "
                "slices of a GPU (MIG) count as that GPU: give each rank a GPU of its own, run a server on each, or "
                "let ranks share GPUs with --device-ids 0,0, for tests"
            )


def bus_place(device: torch.device) -> str:
    """Return where a GPU is on its host's bus, as nvidia-smi writes it: ``0000:3b:00``."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == _SUCCESS else None


def _handle(uuid: str) -> ctypes.c_void_p | None:
    """The driver's handle of a GPU, if its library is there and knows it."""
    library, handle = _library(), ctypes.c_void_p()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if library is None or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    return handle


def clock_rates(uuid: str) -> dict[str, int]:
    """Return the present clocks of the GPU ``uuid`` in MHz, those that the driver's library tells."""
    library, handle = _library(), _handle(uuid)
    if library is None or handle is None:
        return {}
    rates = {}
    for name, kind in _CLOCKS.items():
        rate = ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(handle, kind, ctypes.byref(rate)) == _SUCCESS:
            rates[name] = int(rate.value)
    return rates


def process_bytes(uuid: str) -> int | None:
    """Bytes that this process uses on the GPU ``uuid``, from the driver's library (NVML); None if it does not say.

    ``torch.cuda.mem_get_info`` tells only what all processes use together.

    In a container with its own process ids the driver lists the host's ids or none, so it does not find this process.
    """
    library, handle = _library(), _handle(uuid)
    if library is None or handle is None:
        return None
    count, found = ctypes.c_uint(_MAX_PROCESSES), (_ProcessInfo * _MAX_PROCESSES)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) != _SUCCESS:
        return None
    own = [info.used_bytes for info in found[: count.value] if info.pid == os.getpid()]
    return own[0] if own and own[0] != _NOT_AVAILABLE else None
