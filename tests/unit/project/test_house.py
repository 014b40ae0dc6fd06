"""The house rules on files and names: columns of documents, modules that are too short, names of classes."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "tp_engine").rglob("*.py"))
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *(ROOT / "docs").rglob("*.md"),
]
SHORT_MODULES = Path(__file__).parents[2] / "short_modules.txt"

C_FILES = sorted((ROOT / "tp_engine").rglob("*.[ch]"))

MAX_COLUMNS = 120
SHORT_LINES = 60
MAX_SHORT_MODULES = 15
FOUND_BY_NAME = {"__init__.py", "feature.py"}  # the second by the table of features
BESIDE = {("project",), ("scripts",), ("fake_cuda",)}  # of tests/unit: what they test is not in the package


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", [*DOCUMENTS, *C_FILES], ids=name_of)
def test_documents_and_c_are_at_most_120_columns_wide(path: Path) -> None:
    """Oracle: the rule; a line of a single word, such as an address, cannot be broken."""
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = [
        (number, len(line)) for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS and " " in line.strip()
    ]
    assert not wide, f"{name_of(path)}: lines (and their columns) of more than {MAX_COLUMNS}: {wide}"


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_c_keeps_no_state_that_threads_share(path: Path) -> None:
    """Oracle: the rule; Python calls C from several threads at once, so a static variable is ``_Thread_local``."""
    shared = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*static (?!inline|const |_Thread_local )[^()]*[;=]", line)
    ]
    assert not shared, f"{name_of(path)}: {shared}"


def test_short_modules_have_several_importers_or_a_reason() -> None:
    """Oracle: the rule; tests/short_modules.txt lists the exceptions, and no other module."""
    lines = SHORT_MODULES.read_text(encoding="utf-8").splitlines()
    listed = dict(line.split(" | ") for line in lines if line and not line.startswith("#"))
    importers = importers_of_modules()
    short = {
        name_of(path): name_of(next(iter(importers[path])))
        for path in MODULES
        if num_lines(path) < SHORT_LINES and len(importers[path]) == 1 and path.name not in FOUND_BY_NAME
    }
    folders = tuple(name for name in listed if name.endswith("/"))
    unlisted = {
        name: importer for name, importer in short.items() if name not in listed and not name.startswith(folders)
    }
    assert not unlisted, f"under {SHORT_LINES} lines with one importer; merge each into it: {unlisted}"
    stale = listed.keys() - short.keys() - set(folders)
    assert not stale, f"no exceptions any more: {sorted(stale)}"
    assert len(listed) <= MAX_SHORT_MODULES


def importers_of_modules() -> dict[Path, set[Path]]:
    """Which modules of the package import a module."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for importer in MODULES:
        for node in ast.walk(ast.parse(importer.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None and node.level == 0, f"{name_of(importer)} has a relative import"
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                if name in paths and paths[name] != importer:
                    importers[paths[name]].add(importer)
    return importers


def test_unit_tests_lie_as_the_package_does() -> None:
    """Oracle: the folders of the package; a test that imports from a single room lies in the folder of its name."""
    unit, package = ROOT / "tests" / "unit", ROOT / "tp_engine"
    paths = [path for path in unit.rglob("test_*.py") if path.parent.relative_to(unit).parts[:1] not in BESIDE]
    strange = {name_of(path.parent) for path in paths if not (package / path.parent.relative_to(unit)).is_dir()}
    assert not strange, f"tests/unit has folders that tp_engine/ lacks: {sorted(strange)}"
    rooms = {path: rooms_of(path) for path in paths}
    elsewhere = {
        name_of(path): f"tests/unit/{room}/"
        for path in paths
        if len(rooms[path]) == 1
        for room in rooms[path]
        if not path.is_relative_to(unit / room)
    }
    assert not elsewhere, f"these tests belong elsewhere: {elsewhere}"


def rooms_of(path: Path) -> set[str]:
    """The folders of the package whose modules a test imports; of ``apps`` and ``features`` the folders below.

    Not ``requests``, data that tests of all rooms need, nor ``cpu``, whose kernels are tested with their twins.
    """
    modules = [
        node.module.split(".")[1:]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tp_engine.")
    ]
    rooms = {"/".join(parts[: 2 if parts[0] in {"apps", "features"} and len(parts) > 2 else 1]) for parts in modules}
    return {room for room in rooms if (ROOT / "tp_engine" / room).is_dir()} - {"requests", "cpu"}


def test_no_two_classes_have_one_name() -> None:
    """Oracle: every class statement of the package, names with an underscore too."""
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name_of(path)}:{node.lineno}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert not repeated, f"classes of one name; rename the less public one of each: {repeated}"


def test_a_kept_error_is_not_raised_itself() -> None:
    """Oracle: the rule; an attribute of ``self`` outlives its first raise, so a copy (``errors.again``) is raised."""
    kept = [
        f"{name_of(path)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r"\s*raise self\.\w+( from .*)?$", line)
    ]
    assert not kept


def test_the_sizes_of_folders_are_true() -> None:
    """Oracle: the files; docs/architecture.md may be a quarter and 300 lines behind."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = text.split("Thousands of lines of Python: ")[1].split("\n\n")[0]
    sizes = {name: float(size) * 1000 for name, size in re.findall(r"(\w+)\s(\d+\.\d)", told)}
    found: Counter[str] = Counter()
    for path in MODULES:
        if len(parts := path.relative_to(ROOT / "tp_engine").parts) > 1:
            found[parts[0]] += num_lines(path)
    assert sizes.keys() == found.keys()
    wrong = {name: size for name, size in found.items() if abs(sizes[name] - size) > size / 4 + 300}
    assert not wrong, f"docs/architecture.md tells other sizes of {wrong}"
