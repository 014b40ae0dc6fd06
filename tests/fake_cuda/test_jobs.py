"""Jobs on fake nodes: the tokens of the CPU, and logs without a fault (``logs.py``).

They need torch's CUDA build: ``scripts/test_fake_gpus`` runs them in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import logs, programs
from tests.fake_cuda.jobs import JOBS, Job
from tests.fake_cuda.node import ROOT, Node, build

_LIMIT_S = 300
# The oracle is plain PyTorch: compiling the CPU's kernels takes longer than what they save.
os.environ["TP_ENGINE_NATIVE"] = "0"
# A process keeps the rooms for its uploads (layers/upload.py).
_UPLOAD_BYTES = 3 * (4 << 20)
_CHILD_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime."""
    return build(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[..., Path]) -> Callable[[Job], Any]:
    """The result of a job's program on one CPU rank."""
    known: dict[str, Any] = {}

    def of(job: Job) -> Any:
        key = repr((job.program, job.model, job.oracle_options()))
        if key not in known:
            options = {**job.oracle_options(), "model": str(checkpoint(**job.model))}
            known[key] = json.loads(json.dumps(programs.run(job.program, options)))
        return known[key]

    return of


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_tokens_and_logs(
    job: Job, library: Path, checkpoint: Callable[..., Path], expected: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Oracle: the tokens of one CPU rank; the rules of ``logs.faults``."""
    result = tmp_path / "result.json"
    options = {**job.all_options(), "model": str(checkpoint(**job.model))}
    output = run_program(Node(library, job.node), tmp_path, [job.program, json.dumps(options), str(result)], job)
    assert result.exists(), output
    assert not (found := logs.faults(logs.read_logs(tmp_path), pinned_bytes=_UPLOAD_BYTES)), "\n".join(found) + output
    assert json.loads(result.read_text()) == expected(job), output


def run_program(node: Node, folder: Path, arguments: list[str], job: Job) -> str:
    """The output of a program's processes on ``node``, which must end."""
    command = [sys.executable, "-m", "tests.fake_cuda.programs", *arguments]
    environment = {**_own_environment(), **node.environment(folder), **job.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    return f"exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"


def _own_environment() -> dict[str, str]:
    """What a job takes over from this process."""
    return {name: os.environ[name] for name in _CHILD_ENVIRONMENT if name in os.environ}
