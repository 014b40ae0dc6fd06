"""The image for CPUs without docker: the RUN steps of its Dockerfile in a chroot, and the sizes of what they leave.

The chroot is this machine's root with a layer above it (overlayfs), so that paths are those of the image, and what a
step writes stays in the layer.  What the base image would bring is there already: steps of apt-get are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
STAGES = ("wheel", "packages")
BASE_DOWNLOAD_MB, BASE_DISK_MB = 45, 125
"""python:3.12-slim, as its registry tells."""
MOST_DOWNLOAD_MB, MOST_DISK_MB = 350, 900
_OF_THIS_SHELL = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
_TRIAL = ("/venv/bin/tp-engine", "eval", "--threshold", "60%", "--limit", "20", "--device", "cpu",
          "--num-gpu-blocks-override", "256")  # fmt: skip


class Step(NamedTuple):
    """An instruction of a stage."""

    stage: str
    word: str
    arguments: str


def steps_of(text: str) -> list[Step]:
    """The instructions of a Dockerfile, with continued lines joined, without comments."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    found, stage = [], ""
    for line in filter(str.strip, text.splitlines()):
        word, arguments = line.split(maxsplit=1)
        if word == "FROM":
            stage = arguments.rpartition(" AS ")[2]
        found.append(Step(stage, word, arguments.strip()))
    return found


@contextlib.contextmanager
def layered_root(folder: Path) -> Iterator[Path]:
    """This machine's root with a layer of its own in ``folder``."""
    root = folder / "root"
    for name in ("layer", "work", "root"):
        (folder / name).mkdir()
    options = f"lowerdir=/,upperdir={folder / 'layer'},workdir={folder / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
    try:
        for name in ("proc", "dev"):
            subprocess.run(["mount", "--rbind", f"/{name}", str(root / name)], check=True)
            subprocess.run(["mount", "--make-rslave", str(root / name)], check=True)
        yield root
    finally:
        for name in ("proc", "dev", ""):
            subprocess.run(["umount", "--lazy", str(root / name)], check=False)


def run_steps(root: Path, given: dict[str, str]) -> None:
    """Run the stages that make the packages."""
    arguments, place = dict(given), "/"
    for step in steps_of(DOCKERFILE.read_text(encoding="utf-8")):
        if step.stage not in STAGES:
            continue
        if step.word == "ARG":
            name, _, default = step.arguments.partition("=")
            arguments.setdefault(name, default)
        elif step.word == "WORKDIR":
            place = step.arguments
            (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.word == "COPY":
            *sources, target = step.arguments.split()
            for source in sources:
                copy(ROOT / source, root / place.lstrip("/") / target)
        elif step.word == "RUN" and not step.arguments.startswith("apt-get"):
            print(f"RUN {step.arguments[:100]}...", flush=True)
            in_root(root, "sh", "-ec", f"cd {place}; {step.arguments}", **arguments)


def in_root(root: Path, *command: str, **variables: str) -> None:
    """Run a command in the chroot; its Python is the first one on the path."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    subprocess.run(
        ["chroot", str(root), "env", *(f"--unset={name}" for name in _OF_THIS_SHELL), *settings, *command], check=True
    )


def copy(source: Path, target: Path) -> None:
    """Copy a file into a folder, or a folder as ``target``, without what Python and builds leave behind."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "built"))
    else:
        shutil.copy(source, target)


class _Counted:
    """A file that only counts, compressed as a registry keeps layers (gzip at its usual level)."""

    def __init__(self) -> None:
        self.num_bytes, self._gzip = 0, zlib.compressobj(6)

    def write(self, data: bytes) -> int:
        self.num_bytes += len(self._gzip.compress(data))
        return len(data)

    def close(self) -> None:
        self.num_bytes += len(self._gzip.flush())


def sizes_mb(folder: Path) -> tuple[float, float]:
    """The size of a folder on disk and as a compressed layer, in millions of bytes."""
    counted, num_bytes = _Counted(), 0
    with tarfile.open(fileobj=counted, mode="w|", bufsize=1 << 20) as archive:  # type: ignore[call-overload]
        for path in sorted(folder.rglob("*")):
            info = archive.gettarinfo(path)
            with contextlib.ExitStack() as stack:
                archive.addfile(info, stack.enter_context(path.open("rb")) if info.isfile() else None)
            num_bytes += path.lstat().st_blocks * 512 if info.isfile() else 0
    counted.close()
    return num_bytes / 1e6, counted.num_bytes / 1e6


def main() -> int:
    """Build, count and try; 1 if the image is too large."""
    parser = argparse.ArgumentParser("scripts/image_size", description=__doc__)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder, in which the layer stays")
    args = parser.parse_args()
    given = dict(one.split("=", 1) for one in args.build_arg)
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="image-", dir="/var/tmp")))
        root = stack.enter_context(layered_root(folder))
        run_steps(root, given)
        disk, download = sizes_mb(root / "venv")
        in_root(root, "sh", "-ec", 'cd /tmp; exec "$0" "$@"', *_TRIAL, TP_ENGINE_CACHE_DIR="/tmp/cache")
    print(f"packages: {disk:.0f} MB on disk, {download:.0f} MB as downloaded")
    print(f"image: {disk + BASE_DISK_MB:.0f} MB on disk, {download + BASE_DOWNLOAD_MB:.0f} MB as downloaded")
    return int(download + BASE_DOWNLOAD_MB > MOST_DOWNLOAD_MB or disk + BASE_DISK_MB > MOST_DISK_MB)


if __name__ == "__main__":
    raise SystemExit(main())
