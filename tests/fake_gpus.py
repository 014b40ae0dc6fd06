"""Fake GPUs of a host, as reported by torch and NVIDIA's libraries, for tests within one process.

Programs with GPUs that do not exist, and kernels on them: ``tests/fake_cuda``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_engine.worker import device, gpu_host

GB = 1 << 30


@dataclass
class FakeGpus:
    """``count`` GPUs of one kind; a field that a test changes holds from the next query on.

    ``driver``: the newest CUDA that it takes; None: there is no driver.  ``error``: what CUDA says when it starts;
    empty: it works, but nothing may start it.  ``atomics``: pairs of GPUs, the first of which has some on the second.
    ``processes``: pid and bytes of those on the GPU; None: the driver does not list them.
    """

    count: int = 1
    capability: tuple[int, int] = (9, 0)
    driver: tuple[int, int] | None = (13, 2)
    error: str = ""
    status: int = 0
    atomics: frozenset[tuple[int, int]] = frozenset()
    processes: list[tuple[int, int]] | None = None
    is_integrated: bool = False
    total: int = 80 * GB
    free: int = 50 * GB
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    segments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def properties(self) -> Any:
        major, minor = self.capability
        return SimpleNamespace(
            name="GPU", uuid="1234", total_memory=self.total, major=major, minor=minor, is_integrated=self.is_integrated
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
        """Have torch and the libraries report these."""
        answers: dict[str, Callable[..., Any]] = {
            "device_count": lambda: self.count,
            "is_available": lambda: bool(self.count) and not self.error,
            "get_device_capability": lambda index=None: self.capability,
            "get_device_properties": lambda index: self.properties,
            "can_device_access_peer": lambda one, other: True,
            "_lazy_init": self._start,
            "set_device": lambda index: None,
            "synchronize": lambda index=None: None,
            "mem_get_info": lambda index: (self.free, self.total),
            "memory_reserved": lambda index: self.reserved,
            "memory_allocated": lambda index: self.allocated,
            "max_memory_allocated": lambda index: self.peak,
            "memory_snapshot": lambda: self.segments,
            "Event": _Event,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        load = ctypes.CDLL
        libraries = {"libcuda.so.1": self._cuda, "libnvidia-ml.so.1": self._nvml}
        monkeypatch.setattr(ctypes, "CDLL", lambda name, **more: libraries.get(name, lambda: load(name, **more))())
        monkeypatch.setattr(device, "_library", device._library.__wrapped__)
        return self

    def has_files(self, monkeypatch: pytest.MonkeyPatch, version: Path, devices: Path) -> None:
        """Have the kernel report its driver in the file ``version``, and the GPUs in the folder ``devices``."""
        monkeypatch.setattr(gpu_host, "_DRIVER_FILE", version)
        monkeypatch.setattr(gpu_host, "_DEVICE_FOLDER", devices)

    def _start(self) -> None:
        assert self.error, "a GPU is touched"
        raise RuntimeError(self.error)

    def _cuda(self) -> Any:
        if self.driver is None:
            raise OSError("libcuda.so.1")

        def version(found: Any) -> int:
            assert self.driver is not None
            found._obj.value = 1000 * self.driver[0] + 10 * self.driver[1]
            return 0

        def place(found: Any, index: int) -> int:
            found._obj.value = index
            return self.status

        def link(found: Any, attribute: int, source: Any, target: Any) -> int:
            assert attribute == 3, "native atomics"
            found._obj.value = int((source.value, target.value) in self.atomics)
            return self.status

        return SimpleNamespace(
            cuDriverGetVersion=version,
            cuInit=lambda flags: self.status,
            cuDeviceGet=place,
            cuDeviceGetP2PAttribute=link,
        )

    def _nvml(self) -> Any:
        if self.processes is None:
            raise OSError("libnvidia-ml.so.1")
        own = self.processes

        def processes(handle: Any, count: Any, found: Any) -> int:
            count._obj.value = len(own)
            for place, (pid, used) in enumerate(own):
                found[place].pid, found[place].used_bytes = pid, used
            return 0

        return SimpleNamespace(
            nvmlInit_v2=lambda: 0,
            nvmlDeviceGetHandleByUUID=lambda name, handle: 0 if name == b"GPU-1234" else 6,
            nvmlDeviceGetComputeRunningProcesses_v3=processes,
        )


class _Event:
    """A point that the device has reached already."""

    def record(self) -> None:
        """There is no stream."""

    def query(self) -> bool:
        return True
