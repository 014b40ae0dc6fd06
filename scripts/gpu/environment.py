"""Print this host's GPUs, driver, versions, and missing packages.  Ends with one JSON line."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "flash-attn")


def main() -> None:
    """Print it."""
    facts: dict[str, object] = {"benchmark": "environment", "python": platform.python_version()}
    facts |= {"kernel": platform.release(), "cores": len(_cores()), "packages": versions(), "missing": missing()}
    facts["gpus"] = gpus()
    if shutil.which("nvidia-smi"):
        for query in ((), ("topo", "-m")):
            done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=False)
            print(done.stdout)
    for key, value in facts.items():
        print(f"{key:<12}{value}")
    print(json.dumps(facts))


def versions() -> dict[str, str]:
    """The versions of the packages that matter for speed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def missing() -> list[str]:
    """Packages that pyproject.toml requires and this interpreter lacks."""
    if importlib.util.find_spec("packaging") is None:
        return ["packaging"]
    from usable import gaps

    return gaps(["test"])


def gpus() -> list[dict[str, object]]:
    """Each GPU's name, compute capability, memory, and other properties that decide its speed."""
    import torch

    found: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": facts.name,
                "capability": f"{facts.major}.{facts.minor}",
                "memory_gib": round(facts.total_memory / 2**30, 1),
                "multiprocessors": facts.multi_processor_count,
                "l2_mib": round(facts.L2_cache_size / 2**20, 1),
                "cuda": torch.version.cuda,
            }
        )
    return found


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)


if __name__ == "__main__":
    main()
