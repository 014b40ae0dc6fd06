"""Exit with 0 if this interpreter meets the requirements of pyproject.toml, else with 1 and a line per gap.

An interpreter older than 3.11 (no tomllib) or without ``packaging`` fails at the import and also exits with 1.

Usage: python usable.py [extra ...]
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def gaps(extras: list[str]) -> list[str]:
    """Requirements of the project and of ``extras`` that are missing here or of the wrong version."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    missing = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(str(requirement))
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            missing.append(f"{requirement} (found {installed})")
    return missing


if __name__ == "__main__":
    found = gaps(sys.argv[1:])
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
