"""Start tp_engine's server for a benchmark, and stop it the way a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tp_engine.engine.processes import end_process

ROOT = Path(__file__).resolve().parents[3]
_READY = re.compile(r"serving .+ at (http://\S+?),? ")
_STOP_S = 40.0


@contextmanager
def own_server(
    arguments: Sequence[str], num_ranks: int, log: Path, *, script: str = "launch/serve.py", start_s: float = 600.0
) -> Iterator[str]:
    """A server that is ready on a free port, with its output in ``log``; yields its URL.

    Raises ``RuntimeError`` with the end of the log if it ends, or is not ready within ``start_s``.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*(torchrun if num_ranks > 1 else [sys.executable]), script, "--port", "0", *arguments]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=_environment())
    try:
        yield _wait_ready(process, log, time.monotonic() + start_s)
    finally:
        end_process(process, timeout_s=_STOP_S)


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep + path if path else ''}", "PYTHONUNBUFFERED": "1"}


def _wait_ready(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> str:
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := _READY.search(text):
            return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}:\n{text[-4000:]}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server was not ready in time:\n{text[-4000:]}")
        time.sleep(0.1)
