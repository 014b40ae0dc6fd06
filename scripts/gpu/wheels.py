"""What a GPU machine that can install nothing lacks: wheels that travel beside the checkout, and compiled kernels.

::

    here      gpu_check --pack     pip download -> .gpu_carry/*.whl
    there     gpu_check            unpacks those that the machine lacks, and the compiled kernels of the last time
              at its end           OUT/triton_cache.tar.xz, which is put into .gpu_carry for the next time

A wheel is a zip file whose content is importable as it is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
CARRY = ROOT / ".gpu_carry"
CACHE = "triton_cache.tar.xz"
# Importable names of what sections need -> what brings them.  PyTorch, Triton, transformers and pytest are there.
PACKAGES = {
    "msgspec": ("msgspec",), "zmq": ("pyzmq",), "xxhash": ("xxhash",), "psutil": ("psutil",),
    "llguidance": ("llguidance",), "prometheus_client": ("prometheus-client",), "multipart": ("python-multipart",),
    "pydantic": ("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "fastapi": ("fastapi", "starlette", "annotated-doc"), "uvicorn": ("uvicorn", "h11"),
}  # fmt: skip
_PYTHON = "3.12"
_PLATFORMS = tuple(f"manylinux{version}_x86_64" for version in ("2014", "_2_12", "_2_17", "_2_28", "_2_31"))
_MOST_BYTES = 16 << 20  # of a file that comes back


def pack() -> int:
    """Download the wheels into ``CARRY``, and print the call to make; returns the exit code."""
    CARRY.mkdir(exist_ok=True)
    names = [name for names in PACKAGES.values() for name in names]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", _PYTHON, *platforms, "--dest", str(CARRY)]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    if subprocess.run([*command, *pins, *names], check=False).returncode:
        return 1
    num_bytes = sum(path.stat().st_size for path in CARRY.iterdir())
    print(
        f"{len(list(CARRY.glob('*.whl')))} wheels for Python {_PYTHON} in {CARRY.name}/, {num_bytes >> 20} MiB. "
        f"On the GPU machine, in a copy of this checkout with {CARRY.name}/:\n\n"
        "    scripts/gpu_check --plan 1                                    at most 560 s\n"
        f"    scripts/gpu_check --again {CARRY.name}/gpu_check.json     what failed, in at most 200 s\n\n"
        f"Bring back the files of its results ($OUT); put gpu_check.json and {CACHE} into {CARRY.name}/."
    )
    return 0


def unpack() -> list[str]:
    """Make what ``CARRY`` has importable here and in children, as far as it is missing; return the names."""
    wanted = [path for path in sorted(CARRY.glob("*.whl")) if not _is_here(path)]
    if not wanted:
        return []
    folder = tempfile.mkdtemp(prefix="gpu_check-packages-")
    for path in wanted:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    sys.path.append(folder)
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    return [path.name.partition("-")[0] for path in wanted]


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return those of ``modules`` that cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def bring_kernels() -> Path:
    """Let Triton use one folder for all sections, with what ``CARRY`` has of an earlier machine; return it."""
    folder = Path(os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="gpu_check-triton-")))
    folder.mkdir(parents=True, exist_ok=True)
    if (CARRY / CACHE).exists():
        with tarfile.open(CARRY / CACHE) as archive:
            archive.extractall(folder, filter="data")
    return folder


def keep_kernels(folder: Path, out: Path) -> str:
    """Write the compiled kernels to a file in ``out``; returns what there is to say of it."""
    path = out / CACHE
    with tarfile.open(path, "w:xz", preset=1) as archive:
        archive.add(folder, arcname=".")
    if (size := path.stat().st_size) > _MOST_BYTES:
        path.unlink()
        return f"the compiled kernels are {size >> 20} MiB, too many to come back"
    return f"compiled kernels: {size / (1 << 20):.1f} MiB in {path.name}"


def _is_here(path: Path) -> bool:
    name, *_ = parse_wheel_filename(path.name)
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
