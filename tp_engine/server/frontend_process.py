"""The frontend process as rank 0 starts it: HTTP and tokenization away from the engine's interpreter."""

from __future__ import annotations

import subprocess
from typing import Any

import msgspec

from tp_engine.engine.incident import describe_exit
from tp_engine.engine.processes import end_process
from tp_engine.system.child_process import start_child

_FLUSH_S = 3.0


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The frontend's settings, as JSON on its standard input.

    ``pulse_address`` is that of rank 0's pulse, which may be silent for ``hard_limit_s`` before the frontend gives up
    its requests.  ``tokenizer`` is a folder whose tokenizer the frontend loads while the engine starts; if None, the
    engine names it.
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


def start_frontend(settings: FrontendSettings) -> subprocess.Popen[bytes]:
    """Start the frontend on a listening socket; the caller may then close its own handle.  It dies with this
    process."""
    # A session of its own: a Ctrl-C at the terminal reaches the frontend through rank 0 alone.
    text = msgspec.json.encode(settings)
    return start_child("tp_engine.server.main", text, own_session=True, pass_fds=(settings.listener_fd,))


def end_frontend(process: subprocess.Popen[bytes]) -> None:
    """End the frontend, which may deliver the answers that are ready for a few seconds, and wait for its end."""
    end_process(process, timeout_s=_FLUSH_S)


def check_frontend(process: subprocess.Popen[bytes]) -> None:
    """Raise ``ChildProcessError`` if the frontend has ended."""
    code = process.poll()
    if code is not None:
        raise ChildProcessError(f"the HTTP process {process.pid} ended with {describe_exit(code)}")
