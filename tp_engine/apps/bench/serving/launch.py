"""Start tp_engine's server for a benchmark, and stop it as a user does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tp_engine.apps.own_server import wait_ready
from tp_engine.engine.processes import end_process
from tp_engine.system import env

_PACKAGES = Path(__file__).resolve().parents[4]  # the folder that has the package, a checkout or site-packages
_STOP_S = 40.0


@contextmanager
def own_server(
    arguments: Sequence[str],
    num_ranks: int,
    log: Path,
    *,
    program: Sequence[str] = ("tp_engine", "serve"),
    start_s: float = 600.0,
    threads: int = 0,
) -> Iterator[str]:
    """A server that is ready on a free port, alone or under torchrun, with its output in ``log``; yields its URL, and
    stops it at the end.  Raises ``RuntimeError`` with the end of the log if it ends, or is not ready within
    ``start_s``."""
    port_file = log.resolve().with_name(f"{log.name}.port")
    port_file.unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    python = [sys.executable, *(torchrun if num_ranks > 1 else [])]
    command = [*python, "-m", *program, "--port-file", str(port_file), *arguments, "--port", "0"]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=own_environment(threads))
    try:
        try:
            url, told = wait_ready(process, port_file, timeout_s=start_s), "the server ended with exit code {}"
        except TimeoutError as error:
            url, told = None, str(error)
        if url is None:
            end = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise RuntimeError(f"{told.format(process.returncode)}:\n{end}")
        yield url
    finally:
        end_process(process, timeout_s=_STOP_S)


def own_environment(threads: int = 0) -> dict[str, str]:
    """An environment that imports tp_engine from where this process has it."""
    chosen = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return env.copied() | {"PYTHONPATH": env.python_path(_PACKAGES), "PYTHONUNBUFFERED": "1"} | chosen
