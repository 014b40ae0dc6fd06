"""Start tp_engine's server for a benchmark, and stop it as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tp_engine.cli.own_server import wait_ready
from tp_engine.engine.processes import end_process

ROOT = Path(__file__).resolve().parents[3]
_STOP_S = 40.0


@contextmanager
def own_server(
    arguments: Sequence[str], num_ranks: int, log: Path, *, script: str = "launch/serve.py", start_s: float = 600.0
) -> Iterator[str]:
    """A server that is ready on a free port, with its output in ``log``; yields its URL.  Raises ``RuntimeError`` with
    the end of the log if it ends, or is not ready within ``start_s``."""
    port_file = log.resolve().with_name(f"{log.name}.port")
    port_file.unlink(missing_ok=True)
    with started_server(
        [script, "--port-file", str(port_file), *arguments], num_ranks, log, own_environment()
    ) as process:
        yield _wait_ready(process, port_file, log, start_s)


@contextmanager
def started_server(
    command: Sequence[str], num_ranks: int, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server on a free port, alone or under torchrun; at the end, stop it and wait for it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher = torchrun if num_ranks > 1 else [sys.executable]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*launcher, *command, "--port", "0"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process
    finally:
        end_process(process, timeout_s=_STOP_S)


def own_environment(threads: int = 0) -> dict[str, str]:
    """An environment that imports tp_engine from this checkout, and the benchmark's modules."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    chosen = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **chosen}


def _wait_ready(process: subprocess.Popen[bytes], port_file: Path, log: Path, start_s: float) -> str:
    try:
        url = wait_ready(process, port_file, timeout_s=start_s)
    except TimeoutError as error:
        raise RuntimeError(f"{error}:\n{_end_of(log)}") from None
    if url is None:
        raise RuntimeError(f"the server ended with exit code {process.returncode}:\n{_end_of(log)}")
    return url


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]
