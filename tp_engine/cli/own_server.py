"""A server for one session at a terminal: started here, ended with it, open to nobody else.

``python -m tp_engine.cli.own_server`` is that server's process; its orders come as JSON on standard input.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.processes import die_with_parent, end_process
from tp_engine.log import configure_logging

_READY = re.compile(r"^serving .+ at (http://\S+?),? ")
_STOP_S = 30.0
_LOG_TAIL = 4000


class OwnServer(NamedTuple):
    """Where it is, and the key that only this session knows."""

    url: str
    api_key: str


class _Orders(msgspec.Struct, frozen=True):
    engine: dict[str, Any]
    api_key: str
    parent_pid: int


@contextlib.contextmanager
def own_server(engine: Mapping[str, Any]) -> Iterator[OwnServer]:
    """Start a server with these options of ``EngineConfig``, wait until it is ready, and stop it at the end.

    ``RuntimeError`` with the end of its log if it does not start.
    """
    orders = _Orders(dict(engine), secrets.token_urlsafe(32), os.getpid())
    with tempfile.TemporaryDirectory(prefix="tp_engine-") as folder, (Path(folder) / "log").open("w+b") as log:
        # A session of its own: the terminal's Ctrl-C stops an answer, not the server.
        process = subprocess.Popen(
            [sys.executable, "-m", "tp_engine.cli.own_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            with process.stdin as stream, contextlib.suppress(BrokenPipeError):
                stream.write(msgspec.json.encode(orders))
            yield OwnServer(_wait_ready(process, Path(log.name)), orders.api_key)
        finally:
            end_process(process, timeout_s=_STOP_S)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := _READY.search(line.decode(errors="replace")):
            threading.Thread(target=process.stdout.read, name="server-output", daemon=True).start()
            return found[1]
    code = process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    raise RuntimeError(f"the server ended with exit code {code}:\n{text[-_LOG_TAIL:]}")


def main() -> int:
    """Serve until told to stop, or until the session's process has ended."""
    from tp_engine.server.config import ServerConfig
    from tp_engine.server.lifecycle import serve

    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=_Orders)
    die_with_parent(orders.parent_pid)
    configure_logging("rank 0")
    return serve(EngineConfig(**orders.engine), ServerConfig(port=0, api_key=(orders.api_key,)))


if __name__ == "__main__":
    sys.exit(main())
