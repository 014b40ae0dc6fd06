"""Builds the fake runtime, and describes nodes to it by environment variables (``FAKE_CUDA_*``)::

GPUS       kinds (below) and numbers: "8xH100", the default, or "1xH100,1xA100"
P2P        pairs that read each other's memory: 1 (all), 0, or "0-1,2-3";  ATOMICS: those with native atomics
FREE_GIB   what is free on each GPU before the job
DRIVER     the newest CUDA that the driver takes, as CUDA numbers it: 12020 is 12.2
FAULTS     FAULT@GPU:N, with spaces between: the N-th call and all later ones fail.  alloc: an allocation;
           hang: a collective that never ends; lost: every call, because the GPU is gone; start: CUDA's start
LAZY       1: a stream's work runs as late as it may, when somebody waits for it or the process has nothing to do;
           2: the default stream's does, and that of others before it, unless they wait; 0: at once
LOG        the folder of the logs
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Name, compute capability (two numbers), processors, GiB, and KiB of shared memory that a block can have.
KINDS = {
    "H100": ("NVIDIA H100 80GB HBM3", 9, 0, 132, 80, 227),
    "A100": ("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80, 163),
    "L40": ("NVIDIA L40S", 8, 9, 142, 45, 99),
    "B200": ("NVIDIA B200", 10, 0, 148, 178, 227),
    "RTX6000": ("NVIDIA RTX PRO 6000 Blackwell", 12, 0, 188, 96, 99),
    "T4": ("Tesla T4", 7, 5, 40, 15, 64),
    "MIG": ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, 60, 40, 227),  # all are slices of one GPU
}
_HERE = Path(__file__).parent
_SOURCES = sorted((_HERE / "runtime").glob("*.cpp"))
# Torch loads the driver and the library of nvidia-smi by these names.
_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def build(folder: Path) -> Path:
    """Compile the runtime into ``folder``; returns the library.  Triton brings CUDA's headers."""
    headers = Path(sysconfig.get_path("purelib"), "triton", "backends", "nvidia", "include")
    library = folder / _NAMES[0]
    flags = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Werror", f"-I{headers}"]
    subprocess.run(["g++", *flags, *map(str, _SOURCES), "-o", str(library), "-ldl"], check=True, timeout=300)
    for name in _NAMES[1:]:
        (folder / name).symlink_to(library.name)  # one file, so one library, whatever its name
    return library


@dataclass(frozen=True, slots=True)
class Node:
    """A node with the runtime ``library``; ``settings`` are the variables above, without their prefix."""

    library: Path
    settings: Mapping[str, str]

    def environment(self, logs: Path) -> dict[str, str]:
        """What a job's processes need; their logs go to ``logs``."""
        own = {f"FAKE_CUDA_{name}": value for name, value in self.settings.items()}
        devices = _devices(self.settings.get("GPUS", "8xH100"))
        return {
            "LD_PRELOAD": str(self.library),
            "LD_LIBRARY_PATH": str(self.library.parent),
            "PYTHONPATH": os.pathsep.join((str(_HERE / "on_path"), str(ROOT))),
            "TRITON_INTERPRET": "1",
            "FAKE_CUDA_LOG": str(logs),
            "TP_ENGINE_CACHE_DIR": str(logs / "cache"),  # what is chosen on a fake GPU is for no other start
            "FAKE_CUDA_DEVICES": devices,
            **own,
            **_coverage(),
        }


def _devices(gpus: str) -> str:
    """Every GPU for the runtime: the facts of its kind and its place on the bus."""
    pairs = [part.split("x", 1) for part in gpus.split(",")]
    kinds = [kind for count, kind in pairs for _ in range(int(count))]
    places = [1 if kind == "MIG" else number for number, kind in enumerate(kinds, start=1)]
    return ";".join(",".join(map(str, (*KINDS[kind], place))) for kind, place in zip(kinds, places, strict=True))


def _coverage() -> dict[str, str]:
    """Where processes write which lines ran, if FAKE_GPUS_COVERAGE names a folder."""
    folder = os.environ.get("FAKE_GPUS_COVERAGE")
    if folder is None:
        return {}
    settings = Path(folder, "settings")
    source = ROOT / "tp_engine"
    settings.write_text(f"[run]\nparallel = true\nsigterm = true\ndata_file = {folder}/.coverage\nsource = {source}\n")
    return {"COVERAGE_PROCESS_START": str(settings)}
