"""A server for one session, at a terminal or of tests: started for it, stopped with it, closed to other clients.

``main`` is that server's process; it reads its orders as JSON from standard input.
"""

import contextlib
import http
import http.client
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.engine.processes import die_with_parent, end_process
from tp_engine.system.child_process import start_child
from tp_engine.system.log import configure_logging

_STOP_S = 30.0
_POLL_S = 0.05
_ANSWER_S = 10.0
_LOG_TAIL = 4000


class OwnServer(NamedTuple):
    """Its address, the key that only this session knows, its process, and the file of its log."""

    url: str
    api_key: str
    process: subprocess.Popen[bytes]
    log: Path


class _Orders(msgspec.Struct, frozen=True):
    engine: dict[str, Any]
    server: dict[str, Any]
    api_key: str
    port_file: str
    parent_pid: int


@contextlib.contextmanager
def own_server(
    engine: Mapping[str, Any], server: Mapping[str, Any] | None = None, *, log_file: Path | None = None
) -> Iterator[OwnServer]:
    """Start a server with these options of ``EngineConfig`` and ``ServerConfig``, wait until it is ready, and stop it
    at the end.  ``log_file`` stays; without it the log is removed with the server.

    ``RuntimeError`` with the end of its log if it does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tp_engine-")))
        log = stack.enter_context((log_file or folder / "log").open("w+b"))
        port_file = folder / "port"
        orders = _Orders(dict(engine), dict(server or {}), secrets.token_urlsafe(32), str(port_file), os.getpid())
        # In another session, so that the terminal's Ctrl-C stops an answer, not the server.
        process = start_child("tp_engine.apps.own_server", msgspec.json.encode(orders), own_session=True, output=log)
        try:
            url = wait_ready(process, port_file)
            if url is None:
                text = Path(log.name).read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"the server ended with exit code {process.returncode}:\n{text[-_LOG_TAIL:]}")
            yield OwnServer(url, orders.api_key, process, Path(log.name))
        finally:
            end_process(process, timeout_s=_STOP_S)


def wait_ready(process: subprocess.Popen[bytes], port_file: Path, *, timeout_s: float | None = None) -> str | None:
    """The URL of a server on this host that ``process`` starts with ``port_file``, once it is healthy.

    None if the process has ended.  ``TimeoutError`` after ``timeout_s``; without it the server's own limits count.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            port = int(port_file.read_text())
            if _is_healthy(port):
                return f"http://127.0.0.1:{port}"
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TimeoutError(f"the server was not ready within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return None


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> int:
    """Serve until told to stop, or until the session's process has ended."""
    from tp_engine.server.config import ServerConfig
    from tp_engine.server.lifecycle import serve

    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=_Orders)
    die_with_parent(orders.parent_pid)
    configure_logging("rank 0")
    own = {"port": 0, "port_file": orders.port_file, "api_key": (orders.api_key,)}
    server = ServerConfig(**{**orders.server, **own})
    return serve(EngineConfig(**orders.engine), server)
