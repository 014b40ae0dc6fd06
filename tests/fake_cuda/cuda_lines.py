"""Which lines of the CUDA path ran in jobs on fake GPUs.

The CUDA path is every function of the package that names CUDA, without its branches for CPUs, every method of a class
that is named after it, and what launches Triton's kernels (the kernels themselves are rewritten before they run).  The
processes of the jobs write what coverage.py saw to a folder (``FAKE_GPUS_COVERAGE``);
``python -m tests.fake_cuda.cuda_lines FOLDER`` prints the lines that did not run, and the share of those that did.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fake_cuda.node import ROOT

PACKAGE = ROOT / "tp_engine"
_NAMES_CUDA = re.compile(r'"cuda"|is_cuda|on_gpu|torch\.cuda|\bCuda[A-Z]')
_IS_CUDA = re.compile(r"""(== ['"]cuda['"]|\b_?is_cuda|\bon_gpu)$""")
_IS_NOT_CUDA = re.compile(r"""(!= ['"]cuda['"]|== ['"]cpu['"])$|^not .*is_cuda$""")


def cuda_lines(source: str, *, launches: bool = False) -> set[int]:
    """The first lines of the statements of ``source`` that are for CUDA; ``launches``: a module of Triton's kernels."""
    found: set[int] = set()
    for node, is_all in _outermost_functions(ast.parse(source), launches):
        text = ast.get_source_segment(source, node) or ""
        if is_all or _NAMES_CUDA.search(text):
            found |= set(_statements(node.body))
    return found


def lines_of(path: Path) -> set[int]:
    """The same of a file of the package."""
    return cuda_lines(path.read_text(encoding="utf-8"), launches=path.name.endswith("_triton.py"))


def _outermost_functions(node: ast.AST, is_all: bool) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Functions but for kernels, each with whether all of it is for CUDA."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not any("jit" in ast.unparse(one) for one in child.decorator_list):
                yield child, is_all
        else:
            is_named = isinstance(child, ast.ClassDef) and child.name.startswith("Cuda")
            yield from _outermost_functions(child, is_all or is_named)


def _statements(body: list[ast.stmt]) -> Iterator[int]:
    """The lines of ``body``, without docstrings, branches for CPUs, and what is after an early return for CUDA."""
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text:
            yield statement.lineno
        parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        parts += [handler.body for handler in getattr(statement, "handlers", [])]
        parts += [case.body for case in getattr(statement, "cases", [])]
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            if _IS_NOT_CUDA.search(test):
                parts[0] = []
            elif _IS_CUDA.search(test):
                parts[1] = []
                if isinstance(statement.body[-1], ast.Return):
                    yield from _statements(statement.body)
                    return
        for part in parts:
            yield from _statements([one for one in part if isinstance(one, ast.stmt)])


def main(folder: str) -> int:
    """Print the lines that did not run, by file, and the share of those that did, by part."""
    coverage: Any = importlib.import_module("coverage")  # of the environment with torch for CUDA only
    ran: dict[str, set[int]] = {}
    for path in Path(folder).glob(".coverage*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            ran.setdefault(name, set()).update(data.lines(name) or ())
    total, missed = Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        wanted = lines_of(path)
        missing = sorted(wanted - ran.get(str(path), set()))
        part = "launches of kernels" if path.name.endswith("_triton.py") else path.relative_to(PACKAGE).parts[0]
        total[part] += len(wanted)
        missed[part] += len(missing)
        if missing:
            print(f"{path.relative_to(ROOT)}: {_ranges(missing)}")
    for part, number in (*total.items(), ("the CUDA path", total.total())):
        gone = missed[part] if part in total else missed.total()
        if number:
            print(f"{number - gone} of {number} lines of {part} ran: {(1 - gone / number):.1%}")
    return 0


def _ranges(lines: list[int]) -> str:
    """``3-5, 9`` for 3, 4, 5 and 9."""
    runs = [[line for _, line in group] for _, group in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
