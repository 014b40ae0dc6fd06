"""Run a command in a terminal, as a person does; read the screen and press Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.e2e.frontend import wait_until

ROOT = Path(__file__).resolve().parents[2]
CTRL_C = b"\x03"


class Terminal:
    """The running command; ``text`` is what the screen has shown so far, with the terminal's own ``^C``."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.text = ""
        self._descriptor = descriptor
        self._code: int | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        """Press the key: the terminal sends SIGINT to the foreground process group."""
        with contextlib.suppress(OSError):  # the command has ended
            os.write(self._descriptor, CTRL_C)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the screen shows ``text``."""
        wait_until(lambda: text in self.text or self.has_ended(), f"{text!r} in {self.text[-3000:]}", timeout_s)
        assert text in self.text, self.text

    def has_ended(self) -> bool:
        """Whether the command itself has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait_end(self, timeout_s: float) -> int:
        """The exit code, after the last output has reached the screen."""
        wait_until(self.has_ended, f"the end; shown: {self.text[-3000:]}", timeout_s)
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), "a process of the command still holds the terminal"
        assert self._code is not None
        return self._code

    def after_ctrl_c(self) -> list[str]:
        """The lines since Ctrl-C was last pressed."""
        return [line for line in self.text.rpartition("^C")[2].splitlines() if line]

    def command_line(self) -> str:
        """The command line of the process."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""

    def close(self) -> None:
        """End all processes that still run."""
        while not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        os.close(self._descriptor)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux: reading fails after the last process has closed the terminal
            while data := os.read(self._descriptor, 65536):
                self.text += data.decode(errors="replace").replace("\r\n", "\n")


@contextlib.contextmanager
def at_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run ``command`` in the repository's root, as the foreground process group of a new terminal."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], list(command), dict(environment))
    terminal = Terminal(pid, descriptor)
    try:
        yield terminal
    finally:
        terminal.close()
