"""scripts/gpu_check, rehearsed on a fake node: what it starts exists, runs, and says what it should.

A machine with a GPU may be there for one call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.node import ROOT, Node, build

_SLICES = {"llama-70b_1", "gpt-oss-120b_1", "deepseek-v3_1", "qwen3.5-35b_1", "qwen3-235b_64"}


@pytest.mark.timeout(3300)
def test_first_plan(tmp_path: Path) -> None:
    """Oracle: every section of plan 1 ends well; the kernels' tests give the twins' values, captured and replayed; each
    slice reports its steps; what was compiled comes back as a file."""
    (tmp_path / "runtime").mkdir()
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text('#!/bin/sh\nwhile [ "${1#*python}" = "$1" ]; do shift; done\nexec "$@"\n', encoding="utf-8")
    sanitizer.chmod(0o755)
    environment = {
        **os.environ,
        **Node(build(tmp_path / "runtime"), {"GPUS": "1xH100"}).environment(tmp_path / "logs"),
        "PATH": f"{sanitizer.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "TMPDIR": str(tmp_path),
        "TP_ENGINE_NATIVE": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    (tmp_path / "logs").mkdir()
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check"), "--plan", "1", "--rehearse", "--out", str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    outcomes = {one["name"]: one for one in json.loads((tmp_path / "out/plan_1/gpu_check.json").read_text())}
    assert {one["status"] for one in outcomes.values()} == {"passed"}
    assert int(outcomes["new_kernels"]["note"].partition(" passed")[0]) >= 600
    assert int(outcomes["memory"]["note"].partition(" passed")[0]) >= 20
    assert "1 of 1 slices" in outcomes["compile"]["verdict"]
    for name in _SLICES:
        (steps,) = outcomes[name]["report"]["results"]
        assert steps["step_ms"] > 0, name
    assert (tmp_path / "out/plan_1/triton_cache.tar.xz").exists()
