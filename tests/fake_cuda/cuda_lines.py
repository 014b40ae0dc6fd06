"""Which lines of the CUDA path ran in jobs on fake GPUs.

The CUDA path is every function of four folders that names CUDA, without its branches for CPUs.  The processes of the
jobs write what coverage.py saw to a folder (``FAKE_GPUS_COVERAGE``);
``python -m tests.fake_cuda.cuda_lines FOLDER`` prints the share, and the lines that did not run.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fake_cuda.node import ROOT

FOLDERS = ("worker", "distributed", "sampling", "attention")
_NAMES_CUDA = re.compile(r'"cuda"|is_cuda|on_gpu|torch\.cuda|\bCuda[A-Z]')
_IS_CUDA = re.compile(r"""(== ['"]cuda['"]|\b_?is_cuda|\bon_gpu)$""")
_IS_NOT_CUDA = re.compile(r"""(!= ['"]cuda['"]|== ['"]cpu['"])$|^not .*is_cuda$""")


def cuda_lines(source: str) -> set[int]:
    """The first lines of the statements of ``source`` that are for CUDA."""
    found: set[int] = set()
    for node in _outermost_functions(ast.parse(source)):
        text = ast.get_source_segment(source, node) or ""
        if _NAMES_CUDA.search(text):
            found |= set(_statements(node.body))
    return found


def _outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from _outermost_functions(child)


def _statements(body: list[ast.stmt]) -> Iterator[int]:
    """The lines of ``body``, without docstrings, branches for CPUs, and what is behind an early return for CUDA."""
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
    """Print the share of the lines that ran, and the others by file."""
    coverage: Any = importlib.import_module("coverage")  # of the environment with torch for CUDA only
    ran: dict[str, set[int]] = {}
    for path in Path(folder).glob(".coverage*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            ran.setdefault(name, set()).update(data.lines(name) or ())
    total = missed = 0
    for path in sorted(one for part in FOLDERS for one in (ROOT / "tp_engine" / part).rglob("*.py")):
        wanted = cuda_lines(path.read_text())
        missing = sorted(wanted - ran.get(str(path), set()))
        total, missed = total + len(wanted), missed + len(missing)
        if missing:
            print(f"{path.relative_to(ROOT)}: {_ranges(missing)}")
    print(f"{total - missed} of {total} lines of the CUDA path ran: {(1 - missed / total):.1%}")
    return 0


def _ranges(lines: list[int]) -> str:
    """``3-5, 9`` for 3, 4, 5 and 9."""
    runs = [[line for _, line in group] for _, group in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
