"""scripts/gpu_check, rehearsed on a fake node: what it starts exists, runs, and says what it should.

A machine with a GPU may be there for one call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.node import ROOT, Node
from tests.fake_cuda.test_jobs import library

__all__ = ["library"]
_SLICES = {"llama-70b_1", "gpt-oss-120b_1", "deepseek-v3_1", "qwen3.5-35b_1", "qwen3-235b_64"}
_KERNEL = "tests/gpu/test_kernels_gpu.py::test_kernel[kernel_cases_tree_linear-64 to 40, float32]"
Check = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def check(library: Path, tmp_path: Path) -> Check:
    """Rehearse: returns the exit code, the output, and how each section ended."""
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text('#!/bin/sh\nwhile [ "${1#*python}" = "$1" ]; do shift; done\nexec "$@"\n', encoding="utf-8")
    sanitizer.chmod(0o755)
    (tmp_path / "logs").mkdir()

    def run(*arguments: str, results: str, sanitizes: bool = True) -> tuple[int, str, dict[str, Any]]:
        environment = {
            **os.environ,
            **Node(library, {"GPUS": "1xH100"}).environment(tmp_path / "logs"),
            "PATH": os.pathsep.join([*[str(sanitizer.parent)] * sanitizes, os.environ["PATH"]]),
            "PYTHON": sys.executable,
            "TMPDIR": str(tmp_path),
            "TP_ENGINE_NATIVE": "0",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }
        command = [str(ROOT / "scripts" / "gpu_check"), "--rehearse", "--out", str(tmp_path / "out"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
        saved = json.loads((tmp_path / "out" / results / "gpu_check.json").read_text())
        assert (tmp_path / "out" / results / "triton_cache.tar.xz").exists()
        return done.returncode, done.stdout[-8000:] + done.stderr[-2000:], {one["name"]: one for one in saved}

    return run


@pytest.mark.timeout(3300)
def test_first_plan(check: Check) -> None:
    """Oracle: every section of plan 1 ends well; the kernels' tests give the twins' values, captured and replayed, and
    engines with other kernels a CPU's tokens; each slice reports its steps, and why their kernels have no times: a
    profiler finds none here.  What was compiled comes back as a file."""
    code, output, outcomes = check("--plan", "1", results="plan_1")
    assert code == 0, output
    assert {one["status"] for one in outcomes.values()} == {"passed"}
    assert int(outcomes["new_kernels"]["note"].partition(" passed")[0]) >= 700
    assert int(outcomes["each_kind"]["note"].partition(" passed")[0]) >= 5
    assert int(outcomes["memory"]["note"].partition(" passed")[0]) >= 20
    assert "1 of 1 slices" in outcomes["compile"]["verdict"]
    for name in _SLICES:
        (steps,) = outcomes[name]["report"]["results"]
        assert steps["step_ms"] > 0 and "saw no work" in steps["not_profiled"], name
        assert "without times of kernels" in outcomes[name]["verdict"]


def test_what_failed_runs_again(check: Check, tmp_path: Path) -> None:
    """By hand: of tests the failed ones alone, and the whole of what did not run."""
    saved = [
        {"name": "new_kernels", "status": "failed", "failed_tests": [_KERNEL]},
        {"name": "environment", "status": "skipped", "failed_tests": []},
        {"name": "memory", "status": "passed", "failed_tests": []},
    ]
    (tmp_path / "earlier.json").write_text(json.dumps(saved))
    code, output, outcomes = check("--again", str(tmp_path / "earlier.json"), results="again")
    assert code == 0, output
    assert outcomes.keys() == {"new_kernels", "environment"}
    assert outcomes["new_kernels"]["note"].startswith("1 passed"), outcomes


def test_without_a_sanitizer(check: Check) -> None:
    """By hand: one section has not run, which is no success: exit code 3."""
    code, output, outcomes = check("--sections", "environment,memory", results="", sanitizes=False)
    assert code == 3, output
    assert (outcomes["environment"]["status"], outcomes["memory"]["status"]) == ("passed", "skipped")
    assert "compute-sanitizer" in outcomes["memory"]["note"]


def test_a_call_ends_in_time(check: Check) -> None:
    """By hand: tests that take longer than the call are interrupted, and what follows them is not begun.  What a
    section takes to end is in the budget; what a start of Python takes is not, and if that is most of it, there is
    another call with more."""
    for budget_s in (60, 240):
        began_s = time.monotonic()
        code, output, outcomes = check("--sections", "new_kernels,memory", "--budget-s", str(budget_s), results="")
        elapsed_s = time.monotonic() - began_s
        if code != 3:
            break
    assert code == 1 and elapsed_s <= 1.5 * budget_s, output
    assert (outcomes["new_kernels"]["status"], outcomes["memory"]["status"]) == ("timeout", "skipped")
