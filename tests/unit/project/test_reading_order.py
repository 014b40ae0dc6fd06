"""The CONTRIBUTING's reading order: the core of the program, which one person can read in a day."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_LINES = 6000
ITEM = re.compile(r"^\d+\. `([a-z0-9_/]+\.py)`: \S", re.MULTILINE)


def listed() -> list[str]:
    """The files of the list, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return ITEM.findall(text.split("\n## Reading order\n", 1)[1].split("\n## ", 1)[0])


def test_every_file_exists_and_is_listed_once() -> None:
    """Oracle: the package; about 35 files."""
    files = listed()
    assert 30 <= len(files) <= 40 and len(set(files)) == len(files)
    missing = [name for name in files if not (ROOT / "tp_engine" / name).is_file()]
    assert not missing, f"the CONTRIBUTING's reading order names files that do not exist: {', '.join(missing)}"


def test_the_core_reads_in_a_day() -> None:
    """Oracle: the CONTRIBUTING's promise, at most 6,000 lines."""
    lines = sum(len((ROOT / "tp_engine" / name).read_text(encoding="utf-8").splitlines()) for name in listed())
    assert lines <= MAX_LINES, f"the files of the CONTRIBUTING's reading order have {lines:,} lines; shorten the list"
