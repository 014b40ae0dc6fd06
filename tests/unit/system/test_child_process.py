"""How a child is started: where it imports from, what it reads, and that this is the only place that starts Python."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_engine.system import child_process
from tp_engine.system.child_process import start_child

ROOT = Path(__file__).parents[3]
DEADLINE_S = 100.0
PYTHONS = ("system/child_process.py", "apps/doctor/", "apps/bench/")

_TELLS = """
import json, os, sys
def main():
    import queue, tokenizers, types
    told = {"path": sys.path, "folder": os.getcwd(), "files": [queue.__file__, tokenizers.__file__, types.__file__],
            "settings": sys.stdin.read()}
    json.dump(told, sys.stdout)
    return 7
"""

_COLLECTS = """
import gc, sys
KEPT = gc.isenabled(), [[] for _ in range(5000)]
def main():
    is_searched = any(one is KEPT[1] for one in gc.get_objects())
    sys.stdout.write(f"{KEPT[0]} {gc.isenabled()} {gc.get_freeze_count() > 5000} {is_searched}")
    return 7
"""

_IGNORES = """
from tp_engine.system.child_process import ignore_stop_signals
def main():
    ignore_stop_signals()
    return 7
"""


def write_hostile_modules(folder: Path) -> Path:
    """A folder as a user may have it: files with the names of modules that the engine imports."""
    folder.mkdir()
    for name in ("json", "queue", "tokenizers", "torch", "types"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the current folder\\'s {name}.py was imported')\n")
    return folder


def test_a_child_imports_as_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the parent's ``sys.path``, less the current folder; a notebook's ``sys.path.insert(0, ...)`` counts."""
    modules, output = tmp_path / "modules", tmp_path / "output"
    modules.mkdir()
    (modules / "tells.py").write_text(_TELLS)
    hostile = write_hostile_modules(tmp_path / "hostile")
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", "../modules", *sys.path])
    with output.open("w+b") as file:
        child = start_child("tells", b"one\ntwo", output=file)
        assert child.wait(DEADLINE_S) == 7, output.read_text()
    told = json.loads(output.read_text())
    assert told["settings"] == "one\ntwo"
    assert not any(Path(name).is_relative_to(hostile) for name in told["files"])
    assert told["path"] == [str(modules), *map(os.path.abspath, filter(None, sys.path[2:]))]


def test_imports_are_not_searched_for_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the collector's own state while a child imports, and in its main function."""
    (tmp_path / "collects.py").write_text(_COLLECTS)
    monkeypatch.syspath_prepend(tmp_path)
    with (tmp_path / "output").open("w+b") as file:
        assert start_child("collects", b"", output=file).wait(DEADLINE_S) == 7
    assert (tmp_path / "output").read_text() == "False True True False"


def test_a_checkout_that_was_found_in_the_current_directory_is_found_by_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the package's own folder in place of ``''``, where nothing else leads to it (a notebook there)."""
    (tmp_path / "tells.py").write_text(_TELLS)
    others = [entry for entry in sys.path if entry and os.path.abspath(entry) != str(ROOT)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *others])
    with (tmp_path / "output").open("w+b") as file:
        assert start_child("tells", b"", output=file).wait(DEADLINE_S) == 7
    assert json.loads((tmp_path / "output").read_text())["path"][:2] == [str(tmp_path), str(ROOT)]


def test_a_checkout_on_a_relative_path_is_found_after_the_folder_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the package's own folder on the child's path, though the parent's relative path leads nowhere now; the
    child is somewhere."""
    (tmp_path / "tells.py").write_text(_TELLS)
    others = [entry for entry in sys.path if entry and os.path.abspath(entry) != str(ROOT)]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", [str(tmp_path), ".", *others])
    with (tmp_path / "output").open("w+b") as file:
        assert start_child("tells", b"", output=file).wait(DEADLINE_S) == 7
        assert str(ROOT) in json.loads((tmp_path / "output").read_text())["path"]
        gone.rmdir()
        file.truncate(0)
        assert start_child("tells", b"", output=file).wait(DEADLINE_S) == 7
    told = json.loads((tmp_path / "output").read_text().strip("\0"))
    assert str(ROOT) in told["path"] and told["folder"] == "/"


def test_stop_signals_to_the_group_leave_a_child_to_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: its own exit code, although the signals reach it while the interpreter starts."""
    (tmp_path / "ignores.py").write_text(_IGNORES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    child = start_child("ignores", b"")
    for number in (signal.SIGTERM, signal.SIGINT):
        child.send_signal(number)
    assert child.wait(DEADLINE_S) == 7


def test_a_child_that_ends_before_it_reads_is_no_error(tmp_path: Path) -> None:
    """Oracle: its exit code, also for settings that do not fit into a pipe."""
    with (tmp_path / "output").open("w+b") as file:
        child = start_child("no_such_module", bytes(1 << 20), own_session=True, output=file)
        assert child.wait(DEADLINE_S) == 1
    assert "No module named 'no_such_module'" in (tmp_path / "output").read_text()


@pytest.mark.parametrize(("closes", "code"), [(True, 1), (False, -signal.SIGKILL)])
def test_a_child_whose_parent_is_interrupted_says_nothing(
    closes: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: its exit code and output: its input was closed without a word, or its parent has killed it."""

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        started.append(process)
        assert process.stdin is not None
        if closes:
            process.stdin.close()
            process.wait(DEADLINE_S)
        raise KeyboardInterrupt

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(child_process, "_children", SimpleNamespace(add=interrupt))
    with (tmp_path / "output").open("w+b") as file, pytest.raises(KeyboardInterrupt):
        start_child("no_such_module", b"", output=file)
    assert started[0].returncode == code
    assert (tmp_path / "output").read_bytes() == b""


def test_one_place_starts_python() -> None:
    """Oracle: the rule, read from the source: ``sys.executable`` stands nowhere else (``doctor`` shows it, and a
    benchmark runs engines by the interpreters that the user names, of which it is one).

    The process for isolated calls has one thread and no model, and forks itself for each.
    """
    for path in sorted((ROOT / "tp_engine").rglob("*.py")):
        name = path.relative_to(ROOT / "tp_engine").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                if used == "sys.executable":
                    assert name.startswith(PYTHONS), f"{name}: use start_child"
                assert not used.startswith("multiprocessing."), f"{name}: use start_child"
                assert used != "os.fork" or name == "system/isolation/host.py", f"{name}: use start_child"
