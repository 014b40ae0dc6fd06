"""The house rules on imports, read from the source of every module.

Imports point one way, only one place names each outside package, and the control plane does not import torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tp_engine"

# What each part may import directly; indirectly, it may import what those may.  Every part may import the foundation.
DIRECTIONS = {
    "launch": {"cli", "apps"},
    "cli": {"apps"},
    "apps": {"server"},
    "server": {"api"},
    "api": {"engine", "features"},
    "features": {"engine"},
    "engine": {"sched", "ipc", "worker", "grammar"},
    "worker": {"models", "sampling", "weights", "distributed"},
    "models": {"layers"},
    "sampling": {"layers"},
    "layers": {"attention", "distributed", "weights"},
    "weights": {"distributed"},
    "attention": {"kernels"},
    "kernels": set(),
    "distributed": {"ipc", "kernels"},
    "sched": set(),
    "ipc": set(),
    "grammar": set(),
    "foundation": set(),
}

# The module beside the foundation that starts the command, as the files in launch/ do.
LAUNCHERS = {"__main__", "serve"}

# Folders that belong to the foundation: modules of it that now have several files.
FOUNDATION_FOLDERS = {"images", "job", "model_config", "options", "requests", "system"}

# What is told of features, without what they do: who needs no torch reads it.
FEATURE_TABLES = {"extension", "metric", "registry", "options", "__init__"}

# The C kernels belong to the kernels; they stand in a folder of their own so that who works on GPUs may pass it by.
KERNELS = {"cpu", "kernels"}

# Outside package -> the only place that may name it (a folder ends with a slash).
DOORS = {
    "torch.distributed": "tp_engine/distributed/",
    "triton": "tp_engine/kernels/",
    "flash_attn": "tp_engine/attention/flash_attn.py",
    "flash_attn_interface": "tp_engine/attention/flash_attn.py",
    "flashinfer": "tp_engine/distributed/fused_norm.py",
    "safetensors": "tp_engine/weights/",
    "llguidance": "tp_engine/grammar/",
    "ray": "tp_engine/apps/ray/",
    "lm_eval": "tp_engine/apps/eval/harness.py",
    "PIL": "tp_engine/images/",
    "pypdfium2": "tp_engine/images/",
    "pytest": "tp_engine/apps/testing/",
    "os.environ": "tp_engine/system/env.py",
    "os.getenv": "tp_engine/system/env.py",
}

# The oracle reads checkpoints without the code that it judges, benchmarks write some, and a peer's process has no
# tp_engine.
SECOND_DOORS = {
    "safetensors": ("tp_engine/apps/check/stored.py", "tp_engine/apps/bench/"),
    "os.environ": ("tp_engine/apps/bench/offline/engines.py",),
}

TORCH_FREE = ("foundation", "sched", "ipc", "grammar")
FORBIDDEN = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")


@dataclass(frozen=True, slots=True)
class Use:
    """A dotted name that a module imports or spells out, such as ``tp_engine.plan.StepPlan`` or ``os.environ``."""

    path: str
    line: int
    name: str

    def names(self, thing: str) -> bool:
        return self.name == thing or self.name.startswith(thing + ".")


def uses_in(source: str, path: str) -> Iterator[Use]:
    """Every import, also those inside functions and under TYPE_CHECKING, and every attribute of an imported module."""
    tree = ast.parse(source, path)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else ""
                yield Use(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full module name instead of a relative import"
            for alias in node.names:
                yield Use(path, node.lineno, f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) and (first := name.partition("."))[0] in aliases:
            yield Use(path, node.lineno, ".".join(filter(None, (aliases[first[0]] or first[0], first[2]))))


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` of an attribute chain that begins with a plain name."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else None
    return node.id if isinstance(node, ast.Name) else None


@cache
def all_uses() -> tuple[Use, ...]:
    files = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "launch").glob("*.py"))
    return tuple(use for file in files for use in uses_in(file.read_text(), file.relative_to(ROOT).as_posix()))


def part_of_path(path: str) -> str:
    """The part of the house that a file belongs to."""
    pieces = path.removesuffix(".py").split("/")
    if pieces[0] == "launch" or (len(pieces) == 2 and pieces[1] in LAUNCHERS):
        return "launch"
    if pieces[1] in KERNELS:
        return "kernels"
    if pieces[1] == "features" and len(pieces) <= 4 and pieces[-1] in FEATURE_TABLES:
        return "foundation"
    return pieces[1] if len(pieces) > 2 and pieces[1] not in FOUNDATION_FOLDERS else "foundation"


def part_of_name(name: str) -> str:
    """The part of the house that ``tp_engine.x.y`` names."""
    pieces = name.split(".")
    if len(pieces) > 1 and pieces[1] in LAUNCHERS:
        return "launch"
    if len(pieces) > 1 and pieces[1] in KERNELS:
        return "kernels"
    if pieces[1:2] == ["features"] and is_feature_table(name):
        return "foundation"
    is_part = len(pieces) > 1 and (PACKAGE / pieces[1]).is_dir() and pieces[1] not in FOUNDATION_FOLDERS
    return pieces[1] if is_part else "foundation"


def is_feature_table(name: str) -> bool:
    """Whether ``tp_engine.features.x.y`` is in a module of ``FEATURE_TABLES``: the longest beginning that is a file."""
    pieces = name.split(".")
    while not PACKAGE.parent.joinpath(*pieces).is_dir():
        if PACKAGE.parent.joinpath(*pieces).with_suffix(".py").is_file():
            return part_of_path("/".join(pieces)) == "foundation"
        pieces.pop()
    return part_of_path("/".join((*pieces, "__init__"))) == "foundation"


def module_of_path(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def module_of_name(name: str, modules: Collection[str]) -> str:
    """The longest beginning of the dotted ``name`` that is one of ``modules``; empty if there is none."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def find_circle(modules: Collection[str], uses: Iterable[Use]) -> list[str]:
    """Those of ``modules`` of which each imports the next one, the last being the first again; empty if none do."""
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for use in uses:
        here, there = module_of_path(use.path), module_of_name(use.name, modules)
        if there and there != here:
            imports[here].add(there)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def reachable(part: str) -> set[str]:
    parts = {part, "foundation"}
    for below in DIRECTIONS[part]:
        parts |= reachable(below)
    return parts


def report(broken: list[str]) -> None:
    assert not broken, "import rules are broken:\n  " + "\n  ".join(broken)


def test_every_folder_has_its_place() -> None:
    """Oracle: the list of directions above; a new folder needs a line there."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - FOUNDATION_FOLDERS - {"cpu"} == set(DIRECTIONS) - {"foundation", "launch"}


def test_the_root_of_the_package_is_short() -> None:
    """Oracle: the house's rule; who opens the package learns from its list what the engine is.  A file that only marks
    the package as typed tells nothing, and neither does a folder that an older checkout left behind empty."""
    found = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    entries = sorted(path.name for path in found if path.is_file() or any(path.glob("[!_]*")) or any(path.glob("*.py")))
    assert len(entries) <= 30, f"{len(entries)} entries at the root of the package, of at most 30: {entries}"


def test_nothing_below_imports_what_is_beside_the_engine() -> None:
    """Oracle: the imports; the package's front page names the Python API, lazily."""
    above = {"apps", "cli", "launch"}
    report(
        [
            f"{use.path}:{use.line}: {use.name} is beside the engine: only the command starts it"
            for use in all_uses()
            if use.names("tp_engine.apps") and part_of_path(use.path) not in above
            if use.path != "tp_engine/__init__.py"
        ]
    )


def test_imports_point_one_way() -> None:
    """Oracle: the directions above.  The package's front page names the Python API, lazily; no other module may."""
    broken = []
    for use in all_uses():
        if not use.names("tp_engine") or use.path == "tp_engine/__init__.py":
            continue
        here, there = part_of_path(use.path), part_of_name(use.name)
        if there not in reachable(here):
            broken.append(f"{use.path}:{use.line}: {here} must not import {there} ({use.name})")
    report(broken)


def test_no_circle_of_imports() -> None:
    """Oracle: a topological order of all modules exists, imports inside functions and under TYPE_CHECKING included."""
    modules = {module_of_path(file.relative_to(ROOT).as_posix()) for file in PACKAGE.rglob("*.py")}
    circle = find_circle(modules, (use for use in all_uses() if use.path.startswith("tp_engine/")))
    assert not circle, "modules import each other: " + " -> ".join(circle)


def test_a_circle_is_found() -> None:
    """Oracle: three modules written here, the last of which closes the circle in a function."""
    modules = {"p", "p.a", "p.b", "p.c"}
    chain = [*uses_in("import p.b", "p/a.py"), *uses_in("from p import c", "p/b.py")]
    end = uses_in("def f():\n    from p.a import Thing", "p/c.py")
    assert find_circle(modules, chain) == []
    circle = find_circle(modules, [*chain, *end])
    assert set(circle) == {"p.a", "p.b", "p.c"}
    assert all("abc".index(there[-1]) == ("abc".index(here[-1]) + 1) % 3 for here, there in pairwise(circle))


def test_the_c_kernels_have_one_door() -> None:
    """Oracle: ``__all__`` of ``tp_engine/cpu/__init__.py``; no other folder names a module below it."""
    door = {f"tp_engine.cpu.{name}" for name in exported(PACKAGE / "cpu" / "__init__.py")}
    report(
        [
            f"{use.path}:{use.line}: {use.name} is not in the front of tp_engine/cpu/"
            for use in all_uses()
            if use.names("tp_engine.cpu") and not use.path.startswith("tp_engine/cpu/") and use.name not in door
        ]
    )


def exported(path: Path) -> list[str]:
    """The names in a module's ``__all__``."""
    body = ast.parse(path.read_text()).body
    (value,) = (
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(value))


def test_one_door_per_outside_thing() -> None:
    """Oracle: the table of doors above."""
    report(
        [
            f"{use.path}:{use.line}: {use.name} is used outside its door, {door}"
            for use in all_uses()
            for thing, door in DOORS.items()
            if use.names(thing) and not (use.path == door or (door.endswith("/") and use.path.startswith(door)))
            if not use.path.startswith(SECOND_DOORS.get(thing, ()))
        ]
    )


def test_control_plane_names_no_torch() -> None:
    """Oracle: the names in the foundation, sched and ipc."""
    report(
        [
            f"{use.path}:{use.line}: {part_of_path(use.path)} must not import torch ({use.name})"
            for use in all_uses()
            if use.names("torch") and part_of_path(use.path) in TORCH_FREE
        ]
    )


def test_control_plane_loads_no_torch() -> None:
    """Oracle: sys.modules of a fresh interpreter that imported all of the foundation, sched and ipc."""
    paths = [file.relative_to(ROOT).as_posix() for file in sorted(PACKAGE.rglob("*.py"))]
    modules = [module_of_path(path) for path in paths if part_of_path(path) in TORCH_FREE]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_nothing_is_pickled() -> None:
    """Oracle: the imports; a pickle that crosses a process border runs whatever code it carries."""
    report(
        [
            f"{use.path}:{use.line}: {use.name} is not allowed: plans and messages have a fixed layout"
            for use in all_uses()
            for thing in FORBIDDEN
            if use.names(thing)
        ]
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['A']", "os.environ"),
        ("from os import environ", "os.environ"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("import torch.distributed as dist", "torch.distributed"),
        ("import torch as t\nt.distributed.barrier()", "torch.distributed"),
        ("def f():\n    import triton.language as tl", "triton"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tp_engine.api import llm", "tp_engine.api"),
    ],
)
def test_the_reader_sees_every_way_to_name_a_thing(source: str, name: str) -> None:
    """Oracle: each spelling of the same dependency, written here."""
    assert any(use.names(name) for use in uses_in(source, "example.py"))
