"""What ``pip install`` of the pages finds here, without a network: a copy of the checkout, and a wheel of its metadata.

pip reads both to their ends (``--dry-run``): what may be installed, its version and its extras.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.doc_commands import ROOT

_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "README.md", "LICENSE", "THIRD_PARTY.md", "constraints.txt")
_METADATA = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; print(make('.'))"


def make_packages(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The copy (``tree``) and a folder with the wheel (``wheels``), in ``folder``."""
    tree, wheels = folder / "tree", folder / "wheels"
    shutil.copytree(
        ROOT / "tp_engine", tree / "tp_engine", ignore=shutil.ignore_patterns("__pycache__", "built", "*.so")
    )
    for name in _FILES:
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        ["python", "-c", _METADATA],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tree,
        env=dict(variables),
        check=True,
    )
    metadata = tree / done.stdout.splitlines()[-1]
    wheels.mkdir()
    for platform in ("any", "manylinux_2_28_x86_64"):
        with zipfile.ZipFile(wheels / f"{metadata.stem}-py3-none-{platform}.whl", "w") as wheel:
            for file in metadata.rglob("*"):
                wheel.write(file, file.relative_to(tree))
            wheel.writestr(f"{metadata.name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{metadata.name}/RECORD", "")
    return {"tree": str(tree), "wheels": str(wheels)}
