"""The documents name files and folders that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
REMOVED_FILES = {"docs/lab.md"}  # names files of earlier commits
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(page for page in PAGES if page not in REMOVED_FILES))
# `folder/name.py`, `name.c`, `folder/`, but not `--flag`, /an/absolute/path or a NAME that stands for others.
FILE = re.compile(r"`((?:[a-z0-9_.-]+/)*[a-z0-9_-]+\.(?:py|c|h|md|toml|json|jinja)|(?:[a-z0-9_.-]+/)+)`")
# scripts/name.py with or without backticks; git's 0a57657:scripts/name.py is a file of that commit.
SCRIPT = re.compile(r"(?<![\w:/])scripts/[a-z0-9_/]+(?:\.py)?")
# Files of checkpoints and of users, which the documents also name.
NOT_OURS = {"config.json", "tokenizer.json", "generation_config.json", "tokenization_kimi.py"}


@cache
def places() -> set[str]:
    """Every file and folder of the repository by each ending of its path: ``ipc/segment.py`` and ``segment.py``."""
    found: set[str] = set()
    tops = ("tp_engine", "tests", "scripts", "launch", "configs", "deploy", "docs", ".ci", ".github")
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    for path in (*paths, *(ROOT / top for top in tops), *ROOT.glob("*.*")):
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[start:]) + ("/" if path.is_dir() else "") for start in range(len(parts))}
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    """Oracle: the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = (set(FILE.findall(text)) | {name.rstrip("/") for name in SCRIPT.findall(text)}) - NOT_OURS
    missing = sorted(named - places())
    assert not missing, f"{document} names files that do not exist: {', '.join(missing)}"


def test_the_folder_list_is_complete() -> None:
    """Oracle: the folders of the package, and those beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    house = text.split("\n## The house\n", 1)[1].split("\n## ", 1)[0]
    folders = {path.parent.name for path in (ROOT / "tp_engine").glob("*/__init__.py")} | {
        "deploy",
        "launch",
        "scripts",
        "tests",
    }
    missing = sorted(folder for folder in folders if f"{folder}/" not in house)
    assert not missing, f"the folder list of docs/architecture.md lacks {', '.join(missing)}"
