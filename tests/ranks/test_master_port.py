"""A torchrun job without a port for its ranks to meet at is refused at once, with any script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.ranks.launch import ROOT, torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
from tp_engine import LLM
try:
    LLM(device="cpu", num_gpu_blocks_override=32)
except Exception as error:
    raise SystemExit(f"{type(error).__name__}: {error}")
"""
LIMIT_S = 200.0
"""Far below ``startup_timeout_s`` (600 s), the time that the ranks would wait for each other."""


@pytest.mark.parametrize("kind", ["serve", "batch", "script"])
def test_master_port_0_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """Oracle: a message with the value, the rule and the remedy, no traceback of ours, long before the time limit."""
    script, lines = tmp_path / "job.py", tmp_path / "in.jsonl"
    script.write_text(SCRIPT)
    lines.touch()
    target = {
        "serve": ["launch/serve.py", "--port", "0"],
        "batch": ["launch/batch.py", "-i", str(lines), "-o", str(tmp_path / "out.jsonl")],
        "script": [str(script)],
    }[kind]
    began_s = time.monotonic()
    job = torchrun(2, target, meeting=("--rdzv-endpoint", "localhost:0"), timeout_s=LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S
    errors = [line for line in job.stdout.splitlines() if "MASTER_PORT is 0;" in line]
    assert errors and all("from 1 to 65535" in line and "--standalone" in line for line in errors), job.stdout
    if kind == "script":
        assert errors[0].startswith("ConfigError: ")
    else:
        assert len(errors) == 1 and errors[0].startswith(f"{kind}.py: error: "), "rank 0 alone says it"
        assert "exitcode  : 2 " in job.stdout
    assert job.returncode != 0 and f'File "{ROOT / "tp_engine"}' not in job.stdout, "no traceback of ours"
