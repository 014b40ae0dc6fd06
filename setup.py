"""Compile the C kernels into wheels, and write the index's page; all else about the package is in pyproject.toml.

TP_ENGINE_BUILD   all      every level of tp_engine/cpu/compiling/levels.py for this machine's kind, or an error
                  v3,v4    these levels, or an error
                  none     none: a wheel for every platform, whose users compile at their first start
                  unset    as "all" where there is a compiler, else as "none"

An editable installation has none: scripts/lib/environment.sh compiles, and shows how far it is.

The package index shows the README with addresses that lead into the repository, because it knows no files beside it.
"""

import os
import re
import sys
import tomllib
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from tp_engine.cpu.compiling.cache import BUILD_TIMEOUT_S, compiled_library
from tp_engine.cpu.compiling.gcc import BuildError, find_compiler
from tp_engine.cpu.compiling.levels import Level, shippable_levels
from tp_engine.cpu.compiling.shipped import ship
from tp_engine.system.version import __version__

ROOT = Path(__file__).parent


class Package(Distribution):
    """The package; its wheel is one of a platform if it holds compiled kernels."""

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Those that are compiled into what is built."""
        wanted = os.environ.get("TP_ENGINE_BUILD", "")
        known = {one.name: one for one in shippable_levels()}
        if wanted == "none" or "editable_wheel" in self.commands:
            return ()
        names = list(known) if wanted in ("", "all") else wanted.split(",")
        if not known.keys() >= set(names):
            raise SystemExit(f"TP_ENGINE_BUILD is {wanted!r}; it must be all, none, or some of {', '.join(known)}")
        try:
            find_compiler()
        except BuildError as error:
            if wanted:
                raise SystemExit(f"TP_ENGINE_BUILD is {wanted!r}, but {error}") from error
            print(f"tp_engine: a wheel without compiled CPU kernels: {error}", file=sys.stderr)
            return ()
        return tuple(known[name] for name in names)

    def has_ext_modules(self) -> bool:
        """Return whether setuptools must treat this as a package of one platform."""
        return bool(self.levels)


class BuildPackage(build_py):
    """The package's files, and the compiled kernels beside their sources."""

    def run(self) -> None:
        """Build them."""
        super().run()
        if self.distribution.levels and not self.editable_mode:
            built = Path(self.build_lib) / "tp_engine" / "cpu" / "built"
            ship(self.distribution.levels, built, partial(compiled_library, timeout_s=BUILD_TIMEOUT_S))


class Wheel(bdist_wheel):
    """A wheel whose libraries use nothing of Python's, so that one serves all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return its tag."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def index_page(text: str, repository: str, version: str) -> str:
    """A page of the repository for a reader elsewhere: its relative links and pictures lead to the release's tag there,
    before a release to the main branch."""
    ref = "main" if "dev" in version else f"v{version}"
    pictures = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def absolute(match: re.Match[str]) -> str:
        base = f"{pictures}/{ref}" if match[1].startswith("!") else f"{repository}/blob/{ref}"
        return f"{match[1]}({base}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


def readme() -> str:
    """README.md as the index shows it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return index_page(text, project["urls"]["Repository"], __version__)


commands: dict[str, Any] = {"build_py": BuildPackage, "bdist_wheel": Wheel}
if __name__ == "__main__":
    setup(
        distclass=Package,
        cmdclass=commands,
        long_description=readme(),
        long_description_content_type="text/markdown",
    )
