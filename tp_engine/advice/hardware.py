"""Devices by name, with the memory that their driver reports."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.errors import ConfigError
from tp_engine.options.cli import did_you_mean
from tp_engine.units import GIB

# GiB as torch.cuda.mem_get_info tells them, less than the number in the name.
GPU_GIB = {
    "t4": 14.6,
    "l4": 22.0,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.4,
    "v100-32g": 31.7,
    "a100-40g": 39.4,
    "l40s": 44.4,
    "a100-80g": 79.2,
    "h100": 79.2,
    "h200": 139.8,
    "b200": 178.4,
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank's device: its memory in bytes, and the share of it that the engine takes unless told otherwise."""

    name: str
    memory: int
    is_gpu: bool = True

    @property
    def utilization(self) -> float:
        """The default of ``gpu_memory_utilization``."""
        return 0.9 if self.is_gpu else 0.3


def find_gpu(name: str) -> Hardware:
    """A GPU of ``GPU_GIB``; ``ConfigError`` for an unknown name."""
    key = name.lower()
    if key not in GPU_GIB:
        known = ", ".join(GPU_GIB)
        raise ConfigError(
            f"gpu is {name!r}; choose one of {known}{did_you_mean(key, GPU_GIB)}, or give device_memory instead"
        )
    return Hardware(name=key, memory=int(GPU_GIB[key] * GIB))
