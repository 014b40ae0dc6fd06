"""The control-plane benchmark runs, without a model and without other engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ["--readers", "1", "--rows", "2", "--steps", "50", "--rounds", "5", "--step-us", "50"]


def test_a_small_run_ends_with_its_figures() -> None:
    """Oracle: the last line is JSON; a steady decode step has the bytes of the layout's header."""
    job = subprocess.run(
        [sys.executable, "scripts/bench_control_plane.py", "--waits", "blocked", *COUNTS],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    report = json.loads(job.stdout.splitlines()[-1])
    assert [case["mode"] for case in report["cases"]] == ["decode", "mixed"]
    for case in report["cases"]:
        assert set(case["results"]) == {"tp_engine", "pickled objects"}
        for values in case["results"].values():
            assert values["schedule_p50_us"] > 0 and values["publish_to_decoded_p50_us"] > 0
    assert report["cases"][0]["results"]["tp_engine"]["bytes"] == 48
