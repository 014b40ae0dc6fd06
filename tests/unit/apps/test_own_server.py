"""How ``tp-engine`` finds the server that it starts: by its port file and ``/health``, not by its log."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tp_engine.apps.own_server import wait_ready
from tp_engine.errors import ConfigError
from tp_engine.server.listener import write_port_file

DEADLINE_S = 100.0


class Loading(BaseHTTPRequestHandler):
    """Answers the first two questions with 503."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(503 if len(self.asked) < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that logs what the test tells it to."""
    with subprocess.Popen([sys.executable, "-c", "import time; print('up!'); time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_server_is_found_by_its_file_once_it_is_healthy(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Oracle: the third answer is the first 200; the file appears during the wait."""
    file = tmp_path / "port"
    handler = type("Handler", (Loading,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        later = threading.Timer(0.2, write_port_file, (str(file), server.socket))
        later.start()
        url = wait_ready(process, file, timeout_s=DEADLINE_S)
        server.shutdown()
        later.join()
    assert url == f"http://127.0.0.1:{server.server_port}"
    assert handler.asked == ["/health"] * 3  # type: ignore[attr-defined]


def test_a_server_that_ends_is_not_waited_for(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Oracle: None as soon as the process has ended, also if the port file names a port without a listener."""
    file = tmp_path / "port"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        write_port_file(str(file), listener)
    threading.Timer(0.3, process.kill).start()
    assert wait_ready(process, file, timeout_s=DEADLINE_S) is None


def test_a_server_that_is_late_is_given_up(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Oracle: the limit, in the message."""
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        wait_ready(process, tmp_path / "port", timeout_s=0.2)


def test_a_port_file_belongs_to_the_last_server_that_wrote_it(tmp_path: Path) -> None:
    """Oracle: the first server's end leaves the second's port; the second's end leaves no file, also when repeated."""
    file = tmp_path / "port"
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        remove_first, remove_second = write_port_file(str(file), first), write_port_file(str(file), second)
        remove_first()
        assert int(file.read_text()) == second.getsockname()[1]
        remove_second()
        remove_second()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ConfigError, match="port_file"):
            write_port_file(str(tmp_path / "none" / "port"), first)
