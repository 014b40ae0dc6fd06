"""What a GPU machine without installation lacks: wheels that travel beside the checkout, and compiled kernels.

::

    here      gpu_check --pack     pip download -> .gpu_carry/*.whl
    there     gpu_check            unpacks those that the machine lacks, and the last run's compiled kernels
              at its end           OUT/triton_cache.tar.xz, which is put into .gpu_carry for the next time

A wheel is a zip file whose content is importable as it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
CARRY = ROOT / ".gpu_carry"
CACHE = "triton_cache.tar.xz"
# By importable name that sections need: the package with it.
PACKAGES = {
    "msgspec": ("msgspec",), "zmq": ("pyzmq",), "xxhash": ("xxhash",), "psutil": ("psutil",),
    "llguidance": ("llguidance",), "prometheus_client": ("prometheus-client",), "multipart": ("python-multipart",),
    "pydantic": ("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "fastapi": ("fastapi", "starlette", "annotated-doc", "opentelemetry-api"), "uvicorn": ("uvicorn", "h11"),
}  # fmt: skip
# PyTorch, Triton, transformers and pytest are there, with these of their dependencies.
_THERE = {"anyio", "click", "typing-extensions"}
_PYTHON = "3.12"
_PLATFORMS = tuple(f"manylinux{version}_x86_64" for version in ("2014", "_2_12", "_2_17", "_2_28", "_2_31"))
_MOST_BYTES = 14 << 20  # of a file that comes back, without what the compressor still holds
_LOADED = (".json", ".cubin", ".so")  # the others describe the compilation, and are four fifths of a kernel's bytes


def pack() -> int:
    """Download the wheels into ``CARRY``, and print the call to make; returns the exit code."""
    CARRY.mkdir(exist_ok=True)
    for path in CARRY.glob("*.whl"):  # of another day, with other versions
        path.unlink()
    names = [name for names in PACKAGES.values() for name in names]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", _PYTHON, *platforms, "--dest", str(CARRY)]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    if subprocess.run([*command, *pins, *names], check=False).returncode:
        return 1
    if lacking := not_packed(CARRY):
        print(f"the wheels need {', '.join(sorted(lacking))}, too: add them to PACKAGES in {__file__}", file=sys.stderr)
        return 1
    num_bytes = sum(path.stat().st_size for path in CARRY.iterdir())
    print(
        f"{len(list(CARRY.glob('*.whl')))} wheels for Python {_PYTHON} in {CARRY.name}/, {num_bytes >> 20} MiB. "
        f"On the GPU machine, in a copy of this checkout with {CARRY.name}/:\n\n"
        f"    {'scripts/gpu_check --plan 1':<56}at most 560 s\n"
        f"    {f'scripts/gpu_check --again {CARRY.name}/gpu_check.json':<56}what did not pass, in at most 200 s\n\n"
        f"Bring back the files of its results ($OUT); put gpu_check.json and {CACHE} into {CARRY.name}/."
    )
    return 0


def not_packed(folder: Path) -> set[str]:
    """Dependencies of the wheels in ``folder`` that neither the GPU machine nor the folder has."""
    wheels = list(folder.glob("*.whl"))
    packed = {str(parse_wheel_filename(path.name)[0]) for path in wheels}
    environment = {"python_version": _PYTHON, "python_full_version": f"{_PYTHON}.0", "extra": ""}
    needed = set[str]()
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
            fields = BytesParser().parsebytes(wheel.read(name))
        for requirement in map(Requirement, fields.get_all("Requires-Dist", ())):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                needed.add(canonicalize_name(requirement.name))
    return needed - packed - _THERE


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
    """Those of ``modules`` that cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def bring_kernels() -> Path:
    """Have Triton use one folder for all sections, with an earlier machine's kernels from ``CARRY``; returns it."""
    folder = Path(os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="gpu_check-triton-")))
    folder.mkdir(parents=True, exist_ok=True)
    if (CARRY / CACHE).exists():
        with tarfile.open(CARRY / CACHE) as archive:
            archive.extractall(folder, filter="data")
        for path in folder.glob("*/__grp__*.json"):
            _move_group(path)
    return folder


def _move_group(path: Path) -> None:
    """Point a kernel's list of files at those beside it: it has the paths at which they were compiled, and Triton
    compiles again if one of them is missing."""
    files = json.loads(path.read_text(encoding="utf-8"))["child_paths"]
    here = {name: str(path.parent / name) for name in files if (path.parent / name).exists()}
    path.write_text(json.dumps({"child_paths": here}), encoding="utf-8")


def keep_kernels(folder: Path, out: Path) -> str:
    """Write the executable parts of compiled kernels to a file in ``out``, small ones first, as many as may come back;
    returns a message about it."""
    path, part = out / CACHE, out / f"{CACHE}.part"
    kernels = {one: sum(file.stat().st_size for file in _loaded(one)) for one in folder.iterdir() if one.is_dir()}
    kept = 0
    with part.open("wb") as file, tarfile.open(fileobj=file, mode="w:xz", preset=1) as archive:
        for kernel in sorted(kernels, key=lambda one: kernels[one]):
            if file.tell() + kernels[kernel] > _MOST_BYTES:
                break
            kept += 1
            for one in _loaded(kernel):
                archive.add(one, arcname=str(one.relative_to(folder)))
    part.replace(path)
    return f"{kept} of {len(kernels)} compiled kernels: {path.stat().st_size / (1 << 20):.1f} MiB in {path.name}"


class Keeper:
    """Keeps the compiled kernels in ``out`` while sections run, so that a call that is cut has them, and at the end."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder, self._out = folder, out
        self._thread = threading.Thread()
        self.said = ""

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self._keep()

    def keep(self) -> None:
        """Begin to write the file, unless the last time has not ended."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, daemon=True)
            self._thread.start()

    def _keep(self) -> None:
        self.said = keep_kernels(self._folder, self._out)


def _loaded(kernel: Path) -> list[Path]:
    """The files of a kernel that a start loads: its code and description, or the code that launches it."""
    return [path for path in sorted(kernel.iterdir()) if path.suffix in _LOADED]


def _is_here(path: Path) -> bool:
    name, *_ = parse_wheel_filename(path.name)
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
