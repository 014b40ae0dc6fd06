"""Rank 0's handle on the frontend process: HTTP, tokenization and detokenization away from the engine's interpreter."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from tp_engine.child_process import start_child
from tp_engine.engine.incident import describe_exit

_FLUSH_S = 3.0


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The frontend's settings, as JSON on its standard input.

    ``pulse_address`` is that of rank 0's pulse, which may be silent for ``hard_limit_s`` before the frontend gives up
    its requests.  ``tokenizer`` is a folder whose tokenizer the frontend loads while the engine starts; else the engine
    names it.
    """

    server: dict[str, Any]
    model_names: list[str]
    address: str
    listener_fd: int
    parent_pid: int
    startup_timeout_s: float
    pulse_address: str | None = None
    hard_limit_s: float = 0.0
    log_format: str = "text"
    tokenizer: str | None = None


class FrontendProcess:
    """A running frontend.  It dies with this process; ``end`` ends it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, listener: socket.socket, settings: FrontendSettings) -> FrontendProcess:
        """Start the frontend on a listening socket; the caller may then close its own handle."""
        # A session of its own: a Ctrl-C at the terminal reaches the frontend through rank 0 alone.
        text, fds = msgspec.json.encode(settings), (listener.fileno(),)
        return cls(start_child("tp_engine.server.main", text, own_session=True, pass_fds=fds))

    def check(self) -> None:
        """Raise ``ChildProcessError`` if the frontend has ended."""
        code = self._process.poll()
        if code is not None:
            raise ChildProcessError(f"the HTTP process {self._process.pid} ended with {describe_exit(code)}")

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from a thread when the process ends."""

        def watch() -> None:
            self._process.wait()
            callback()

        threading.Thread(target=watch, name="frontend-watch", daemon=True).start()

    def drain(self) -> None:
        """Tell it to refuse new requests, finish the running ones, and end."""
        self._signal(signal.SIGTERM)

    def end(self) -> None:
        """Let it deliver the answers that are ready, for a few seconds at most, and wait for its end."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_FLUSH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
