"""The benchmark of adapters: a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_small_run() -> None:
    """Oracle: every engine ran each round and took time."""
    command = [sys.executable, "scripts/bench_adapters.py", "--shape", "C", "--rounds", "2", "--requests", "3"]
    command += ["--tokens", "8", "--adapters", "2", "--rank", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["seconds"]) == ["no slots", "slots, no adapter", "adapters"]
    assert all(len(found) == 2 and min(found) > 0 for found in report["seconds"].values())
