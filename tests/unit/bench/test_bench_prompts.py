"""The benchmark of prompts: a run on the CPU, and its figures beside their goals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.figures import figures_of

ROOT = Path(__file__).parents[3]


def test_a_run_on_the_cpu() -> None:
    """Oracle: both engines ran all that was asked, and as a CPU records no prompts, their tokens are equal."""
    command = [sys.executable, "scripts/bench_prompts.py", "--shape", "C", "--dtype", "float32", "--repeats", "3"]
    command += ["--batch-size", "2", "--prompt-len", "20", "--engine-options", '{"num_gpu_blocks_override": 64}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [found["sizes"] for found in report["results"]] == ["none", "auto"]
    for found in report["results"]:
        assert found["equal_tokens"] == 1.0 and found["graph_mib"] == 0.0
        assert min(found[name] for name in ("ms_to_first_token", "decode_step_ms", "mixed_step_ms", "start_s")) > 0


def test_figures() -> None:
    """Oracle: by hand: 2.5 of at most 3 ms, mixed steps twice as fast, 6 s and 100 MiB more."""
    common: dict[str, Any] = {"decode_step_ms": 1.4, "equal_tokens": 1.0}
    launched = {"sizes": "none", "ms_to_first_token": 10.0, "mixed_step_ms": 11.0, "start_s": 20.0, "graph_mib": 50.0}
    recorded = {"sizes": "auto", "ms_to_first_token": 2.5, "mixed_step_ms": 5.5, "start_s": 26.0, "graph_mib": 150.0}
    results = [one | common for one in (launched, recorded)]
    report = {"benchmark": "prompts", "shape": "qwen3-0.6b", "prompt_len": 128, "batch_size": 32, "results": results}
    figures = [(one.value, one.unit, one.verdict) for one in figures_of(report)]
    assert figures[:3] == [
        (10.0, "ms to the first token", ""), (11.0, "ms/step with 32 rows", ""), (1.4, "ms/step of 32 rows", ""),
    ]  # fmt: skip
    assert figures[3:] == [
        (2.5, "ms to the first token", "met"), (5.5, "ms/step with 32 rows", ""), (1.4, "ms/step of 32 rows", ""),
        (2.0, "times, mixed steps", ""), (1.0, "of the tokens equal", ""), (6.0, "s more to start", ""),
        (100.0, "MiB more of graphs", ""),
    ]  # fmt: skip
