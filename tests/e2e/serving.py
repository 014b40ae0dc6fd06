"""Start the real server under torchrun, with a deadline on everything, and stop it as a user does."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 100.0
_PORT_NUMBERS = itertools.count(16 * os.getpid())
_READY = re.compile(r"serving \S+ at (http://\S+?),? ")


@dataclass
class Server:
    """A running job; ``log`` grows while it runs."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""

    def text(self) -> str:
        """All that the job has printed so far."""
        return "".join(self.log)

    def stop(self, timeout_s: float = _STOP_S) -> int:
        """Send SIGTERM to torchrun, which passes it to all ranks; returns torchrun's exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the job did not stop within {timeout_s:g} s:\n{self.text()[-5000:]}") from None


def launch(
    num_ranks: int,
    arguments: Sequence[str],
    script: str = "launch/serve.py",
    cwd: Path = ROOT,
    prefix: Sequence[str] = (),
) -> Server:
    """Start ``script`` in the folder ``cwd`` on ``num_ranks`` ranks; without torchrun where ``num_ranks`` is 0.

    ``prefix`` is a command that runs the job.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    process = subprocess.Popen(
        [*prefix, *(torchrun if num_ranks else [sys.executable]), str(ROOT / script), *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    return follow(process)


def follow(process: subprocess.Popen[str]) -> Server:
    """Read what the job prints, in a thread."""
    server = Server(process)
    threading.Thread(target=_read, args=(server,), daemon=True).start()
    return server


def _read(server: Server) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line)
        if match := _READY.search(line):
            server.url = match[1]


@contextmanager
def serving(
    num_ranks: int, *arguments: str, timeout_s: float = 300.0, cwd: Path = ROOT, prefix: Sequence[str] = ()
) -> Iterator[Server]:
    """A ready server on a free port."""
    server = launch(num_ranks, ["--port", "0", *arguments], cwd=cwd, prefix=prefix)
    try:
        wait_until_ready(server, timeout_s)
        yield server
    finally:
        server.stop()


def wait_until_ready(server: Server, timeout_s: float = 300.0) -> None:
    """Wait until the server has printed its address; fails where it ends before."""
    deadline = time.monotonic() + timeout_s
    while not server.url:
        assert server.process.poll() is None, server.text()[-5000:]
        assert time.monotonic() < deadline, f"not ready within {timeout_s:g} s:\n{server.text()[-5000:]}"
        time.sleep(0.05)


@dataclass
class WarmServer:
    """A ready server, whose ranks this process has forked."""

    url: str
    ranks: list[Any]

    def stop(self) -> list[int]:
        """Send SIGTERM to all ranks, as torchrun does; returns their exit codes."""
        for rank in self.ranks:
            rank.terminate()
        for rank in self.ranks:
            rank.join(_STOP_S)
        return [rank.exitcode for rank in self.ranks]


@contextmanager
def warm_serving(num_ranks: int, *arguments: str, timeout_s: float = 300.0) -> Iterator[WarmServer]:
    """A ready server, for tests whose subject is not how it starts: as under torchrun, but the ranks are forked from a
    process that has torch and the engine imported, which takes two seconds of processor time per rank."""
    from tests.ranks.warm_ranks import started_ranks

    with started_ranks(num_ranks, serve, ("--port", "0", *arguments)) as (ranks, log):
        deadline = time.monotonic() + timeout_s
        while not (match := _READY.search(text := log.read_text(encoding="utf-8"))):
            assert all(rank.is_alive() for rank in ranks) and time.monotonic() < deadline, text[-5000:]
            time.sleep(0.05)
        server = WarmServer(match[1], ranks)
        try:
            yield server
        finally:
            server.stop()


def serve(arguments: Sequence[str]) -> None:
    """A rank of a server."""
    from tp_engine.cli.serve import main

    sys.exit(main(arguments))


def free_port() -> int:
    """A port that no program listens on now, another one with each call.

    It lies below the ports that Linux hands out by itself, so that no other program gets it before it is used.
    """
    for number in _PORT_NUMBERS:
        with socket.socket() as probe, suppress(OSError):
            port = 20_000 + number % 12_000
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")
