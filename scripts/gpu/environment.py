"""Print this host's GPUs, driver, versions, compilers, and missing packages: what is quick to find, first."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
_PACKAGES = ("torch", "triton", "transformers", "safetensors", "nvidia-nccl-cu13", "nvidia-cuda-cupti", "flash-attn")
_PROGRAMS = ("nvcc", "compute-sanitizer", "ncu", "nsys", "numactl")


def main() -> None:
    """Print all of it."""
    from lib.usable import gaps

    for line in [*gpus(), *host(), f"missing packages: {', '.join(gaps(['test'])) or 'none'}"]:
        print(line, flush=True)
    if shutil.which("nvidia-smi"):
        for query in ((), ("topo", "-m")):
            subprocess.run(["nvidia-smi", *query], timeout=5, check=False)


def gpus() -> list[str]:
    """Each GPU, and the versions of PyTorch's libraries."""
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            f"GPU {index}: {facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{facts.multi_processor_count} multiprocessors, {facts.total_memory >> 20} MiB"
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return [*found, f"CUDA {torch.version.cuda} of PyTorch, NCCL {nccl}"]


def host() -> list[str]:
    """Python, packages, programs, processors and limits.  Triton compiles what launches a kernel with a C compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    programs = ", ".join(name for name in _PROGRAMS if shutil.which(name)) or "none"
    shared, (locked, _) = shutil.disk_usage("/dev/shm"), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}",
        "packages: " + ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES),
        f"C compiler: {compiler or 'none, and Triton needs one unless its kernels were brought along'}",
        f"programs: {programs}",
        f"{len(os.sched_getaffinity(0))} cores, {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 20} MiB, "
        f"/dev/shm {shared.free >> 20} of {shared.total >> 20} MiB free, "
        f"locked memory {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked >> 20} MiB'}",
    ]


def version_of(package: str) -> str:
    """The installed version, or ``none``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
