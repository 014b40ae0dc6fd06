"""The socket by which the ranks of a torchrun job see that rank 0 lives: one name for each job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0

RANK0 = """
import sys
from tp_engine.server.lifecycle import run_interruptible
def job(asked_to_stop):
    print("runs", flush=True)
    sys.stdin.read()
    return 0
run_interruptible(job)
"""


@contextlib.contextmanager
def rank0(run_id: str, port: int, prefix: Sequence[str] = ()) -> Iterator[str]:
    """A rank 0 whose launcher is this process; its first line, or the last line of its error."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", RANK0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, **place, "TORCHELASTIC_RUN_ID": run_id, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process:
        try:
            yield process.stdout.readline().strip() or process.stderr.read().splitlines()[-1]
            process.stdin.close()
            process.wait(DEADLINE_S)
        finally:
            process.kill()


@pytest.mark.slow
def test_jobs_of_one_launcher_have_names_of_their_own() -> None:
    """Oracle: another port or run is another job, and starts; the same job twice is an error that names the socket."""
    with rank0("a", 29500) as first, rank0("a", 29501) as other_port, rank0("b", 29500) as other_run:
        assert (first, other_port, other_run) == ("runs",) * 3
        with rank0("a", 29500) as again:
            assert again.startswith("RuntimeError: the abstract Unix socket @tp_engine-rank0-"), again
            assert "start the job again" in again


def test_containers_that_share_a_network_do_not_meet() -> None:
    """Oracle: launchers with the same process id in namespaces of their own, of the same run and port, both start."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("this machine does not let a test make process namespaces")
    alone = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with rank0("none", 29500, alone) as first, rank0("none", 29500, alone) as second:
        assert (first, second) == ("runs", "runs")
