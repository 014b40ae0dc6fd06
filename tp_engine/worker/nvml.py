"""How much of a GPU this process uses, from the driver's management library (NVML), which every driver brings.

``torch.cuda.mem_get_info`` tells only what all processes use together.
"""

from __future__ import annotations

import ctypes
import functools
import os

_SUCCESS = 0
_MAX_PROCESSES = 1024
_NOT_AVAILABLE = (1 << 64) - 1


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


def process_bytes(uuid: str) -> int | None:
    """Bytes that this process uses on the GPU ``uuid``; None where the driver does not say.

    In a container with process ids of its own the driver lists ids of the host, or none, and this process is not found.
    """
    library = _library()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    count, found = ctypes.c_uint(_MAX_PROCESSES), (_ProcessInfo * _MAX_PROCESSES)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) != _SUCCESS:
        return None
    own = [info.used_bytes for info in found[: count.value] if info.pid == os.getpid()]
    return own[0] if own and own[0] != _NOT_AVAILABLE else None
