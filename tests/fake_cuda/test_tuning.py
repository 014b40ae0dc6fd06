"""Kernels prove themselves on a fake GPU, recorded and replayed, before a rank has a context."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fake_cuda.node import ROOT, Node
from tests.fake_cuda.test_jobs import _own_environment, library
from tp_engine.kernels.candidates import MANY

__all__ = ["library"]
_LIMIT_S = 900


def test_a_wrong_and_a_crashing_kernel_are_refused(library: Path, tmp_path: Path) -> None:
    """Oracle: what is planted; the code's own choice is the wrong one, and Triton's kernels are right.  The fake has no
    clock, so any of these may be taken; the process that asks opens no context."""
    result = tmp_path / "result.json"
    node = Node(library, {"GPUS": "1xH100"})
    environment = {**_own_environment(), **node.environment(tmp_path), "TP_ENGINE_NATIVE": "0"}
    command = [sys.executable, "-m", "tests.fake_cuda.tuned", str(result)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    assert result.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(result.read_text())
    assert found["tried"].pop("wrong").startswith("it is wrong: its error is")
    assert found["tried"].pop("crash") == "it ended its process, code -11"
    right = {name for name, verdict in found["tried"].items() if verdict == "right"}
    assert right == found["tried"].keys() == {"row", "tiles-16x32x64-w4-s4"}, found
    assert found["choice"][-1][0] == MANY and {name for _, name in found["choice"]} <= right
    assert not found["context"]
