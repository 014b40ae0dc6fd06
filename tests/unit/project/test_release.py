"""The version and what describes a release: told once, and the same everywhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import yaml
from packaging.version import Version

from tp_engine.system.version import __version__

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_told_once() -> None:
    """Oracle: pyproject.toml takes the package's own; nothing else but the list of changes has these characters."""
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version", "readme"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tp_engine.system.version.__version__"}
    told = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    places = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*")]
    places += (ROOT / "tp_engine").rglob("*.py")
    found = [path for path in places if path.is_file() and told.search(path.read_text(encoding="utf-8"))]
    of_the_list = [] if Version(__version__).is_devrelease else ["CHANGELOG.md"]
    assert sorted(path.name for path in found) == [*of_the_list, "version.py"]


def test_the_changelog_goes_with_this_version() -> None:
    """Oracle: the package's version; releases go back in time, and what is not released yet stands above them.

    A commit behind a release has the version of the next one with ``.dev0``, so that no two programs share a version.
    """
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"(?m)^## (.*)$", text)
    last, own = Version(titles[1].split()[0]), Version(__version__)
    has_changes = bool(text.partition("## Unreleased")[2].partition("## ")[0].strip())
    assert titles[0] == "Unreleased" and (own > last and own.is_devrelease if has_changes else own == last)
    dates = [date.fromisoformat(title.split("(")[1][:10]) for title in titles[1:]]
    assert dates == sorted(dates, reverse=True)


def test_the_addresses_agree() -> None:
    """Oracle: the repository's address in pyproject.toml."""
    urls = PROJECT["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == urls["Repository"]
    assert citation["license"] == PROJECT["project"]["license"]
    forms = (ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"https://github.com/[\w-]+/\w+", forms)) == {urls["Repository"]}


def test_a_tag_of_another_version_is_not_released() -> None:
    """Oracle: the script ends before it builds anything, and names both versions."""
    done = subprocess.run([".ci/release", "v0.0.1"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and not done.stdout
    assert f"the tag is v0.0.1, but tp_engine/system/version.py says {__version__}" in done.stderr
