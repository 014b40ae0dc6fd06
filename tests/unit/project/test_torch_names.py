"""Names of torch that are not public, and the versions that the package takes: one place to look after an upgrade."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]

# All private names that the package uses, by their users' word for them.  Those of CUDA builds exist there alone.
EVERYWHERE = {
    "torch._foreach_copy_",
    "torch._scaled_grouped_mm",
    "torch._scaled_mm",
    "torch.distributed._symmetric_memory",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._world",
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkldnn._reorder_linear_weight",
    "torch.utils._python_dispatch.TorchDispatchMode",
}
OF_SYMMETRIC_MEMORY = ("_SymmetricMemory", "get_backend", "rendezvous", "set_backend")


def used_names() -> set[str]:
    """Private names of torch in the package: ``torch.a._b`` and ``from torch.a._b import c``."""
    found: set[str] = set()
    for path in sorted((ROOT / "tp_engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                found.add(ast.unparse(node))
    return {name for name in found if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name)}


def test_private_names_are_these_and_exist() -> None:
    """Oracle: the package's source, and the installed torch."""
    assert used_names() == EVERYWHERE
    for name in EVERYWHERE:
        owner: object = torch
        for part in name.split(".")[1:]:
            owner = _part(owner, part)
    symmetric = import_module("torch.distributed._symmetric_memory")
    assert all(hasattr(symmetric, name) for name in OF_SYMMETRIC_MEMORY)


def _part(owner: object, name: str) -> object:
    """An attribute, or a submodule that nobody has imported yet."""
    if hasattr(owner, name):
        return getattr(owner, name)
    return import_module(f"{owner.__name__}.{name}")  # type: ignore[attr-defined]


def test_the_installed_torch_is_within_the_bounds() -> None:
    """Oracle: the requirement, which has a bound on both sides: private names may change with each minor version."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (least, most) = next(
        found.groups() for one in required if (found := re.fullmatch(r"torch>=(\d+\.\d+),<(\d+\.\d+)", one))
    )
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    assert tuple(map(int, least.split("."))) <= installed < tuple(map(int, most.split(".")))
