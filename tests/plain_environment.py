"""The environment that README's commands make: the project's own dependencies, without those of its tests.

Its packages are links to those of the tests' environment, so that it is there in a second and has the pinned versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "tp_engine"
OF_EVERY_ENVIRONMENT = ("pip",)


def make_plain_environment(folder: Path) -> dict[str, str]:
    """Make the environment in ``folder``; returns the variables of a shell in which it is active."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    for one in needed_distributions():
        for entry in top_entries(one):
            target = packages / entry.name
            if not target.exists():
                target.symlink_to(entry)
    (packages / PROJECT).symlink_to(ROOT / PROJECT)  # what a wheel installs, without the rest of a checkout
    write_programs(folder / "bin", [*needed_distributions(), distribution(PROJECT)])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "VIRTUAL_ENV": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def write_programs(folder: Path, owners: Iterable[Distribution]) -> None:
    """Write the programs of these distributions, such as torchrun, as an installer does."""
    for script in (one for owner in owners for one in owner.entry_points.select(group="console_scripts")):
        program = f"import {script.module}\nraise SystemExit({script.module}.{script.attr}())\n"
        path = folder / script.name
        path.write_text(f"#!{folder}/python\n{program}", encoding="utf-8")
        path.chmod(0o755)


def needed_distributions() -> Iterator[Distribution]:
    """Yield what ``pip install .`` installs except the project itself: dependencies without extras, and theirs."""
    left, seen = [PROJECT, *OF_EVERY_ENVIRONMENT], set[str]()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        if name != re.sub(r"[-_.]+", "-", PROJECT):
            yield found
        for requirement in map(Requirement, found.requires or ()):
            extras = requirement.extras or {""}
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
                left += [inner for extra in extras if extra for inner in needed_by_extra(requirement.name, extra)]


def needed_by_extra(name: str, extra: str) -> Iterator[str]:
    """Yield the names that an extra of a distribution asks for."""
    for requirement in map(Requirement, distribution(name).requires or ()):
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield requirement.name


def top_entries(one: Distribution) -> set[Path]:
    """The files and folders in site-packages that are this distribution's."""
    packages = Path(str(one.locate_file("")))
    names = {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}
    return {packages / name for name in names}
