"""``scripts/serve``: the number of ranks it starts, and the screen after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.terminal import ROOT, Terminal, at_terminal

READY_S = 300.0
STOP_S = 200.0
COMMAND = ["scripts/serve", "--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "64"]
SHORT = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
NUM_LONG = 64  # the blocks hold about one of these requests at a time
LONG = SHORT | {
    "prompt": ["x"] * NUM_LONG,
    "max_tokens": 900,
}
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "TP_SIZE"},
    "VIRTUAL_ENV": sys.prefix,  # the packages of this interpreter
    "CUDA_VISIBLE_DEVICES": "",
}


def assert_stopped(terminal: Terminal) -> None:
    """Check for exit code 0, and for a last line of ours."""
    assert terminal.wait_end(STOP_S) == 0, terminal.text
    for word in ("Traceback", "Error", "ERROR", "terminate"):
        assert word not in terminal.text, terminal.text
    assert terminal.text.splitlines()[-1].endswith("stopped"), terminal.text


class Client(threading.Thread):
    """Streams the answer to ``body`` into ``lines``; the constructor waits for the first line."""

    def __init__(self, terminal: Terminal, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        found = re.search(r"at (http://\S+),", terminal.text)
        assert found is not None
        self._url, self._body = found[1], body
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(STOP_S)

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),  # the answer was cut off
            httpx.stream("POST", self._url + "/v1/completions", json=self._body, timeout=STOP_S) as answer,
        ):
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()


@pytest.mark.slow
def test_ctrl_c_while_the_program_starts() -> None:
    """Oracle: exit code 0 and one last line of ours, after pressing Ctrl-C until the program has ended."""
    with at_terminal(COMMAND, ENVIRONMENT) as terminal:
        deadline_s = time.monotonic() + STOP_S
        while "launch/serve.py" not in terminal.command_line():
            assert time.monotonic() < deadline_s and not terminal.has_ended(), terminal.text
            time.sleep(0.01)
        while not terminal.has_ended():
            assert time.monotonic() < deadline_s, terminal.text
            terminal.press_ctrl_c()
            time.sleep(0.3)
        assert_stopped(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("num_presses", [1, 2])
def test_ctrl_c_while_the_model_loads(num_presses: int) -> None:
    """Oracle: as above; the started ranks print no complaint about the end of rank 0."""
    with at_terminal(COMMAND, ENVIRONMENT) as terminal:
        terminal.wait_for("group_init", READY_S)
        for _ in range(num_presses):
            terminal.press_ctrl_c()
        assert_stopped(terminal)


@pytest.mark.slow
def test_ctrl_c_while_serving() -> None:
    """Oracle: as above; the screen shows only that line."""
    with at_terminal(COMMAND, ENVIRONMENT) as terminal:
        terminal.wait_for("12+34=", READY_S)
        terminal.press_ctrl_c()
        assert_stopped(terminal)
        assert len(terminal.after_ctrl_c()) == 1, terminal.text


@pytest.mark.slow
def test_ctrl_c_with_a_request_in_flight() -> None:
    """Oracle: as above; the answer is finished first."""
    with at_terminal(COMMAND, ENVIRONMENT) as terminal:
        terminal.wait_for("12+34=", READY_S)
        client = Client(terminal, SHORT)
        terminal.press_ctrl_c()
        assert_stopped(terminal)
        client.join(STOP_S)
        assert "data: [DONE]" in client.lines


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_request_in_flight() -> None:
    """Oracle: as above, but the answer is cut off."""
    with at_terminal([*COMMAND, "--shutdown-timeout-s", "25"], ENVIRONMENT) as terminal:
        terminal.wait_for("12+34=", READY_S)
        client = Client(terminal, LONG)
        terminal.press_ctrl_c()
        terminal.wait_for("stopping", STOP_S)
        terminal.press_ctrl_c()
        assert_stopped(terminal)
        client.join(STOP_S)
        assert not client.is_alive() and sum('"length"' in line for line in client.lines) < NUM_LONG


@pytest.mark.parametrize(
    ("arguments", "tp_size", "num_ranks"),
    [
        ([], None, 2),
        ([], "3", 3),
        (["--nproc-per-node", "4"], "3", 4),
        (["-tp", "1"], None, 1),
        (["--tp-size=4"], "3", 4),
        (["--config", "{file}"], None, 8),
        (["--config={file}"], "2", 2),
        (["--nproc-per-node=2", "--config", "{file}"], None, 2),
    ],
)
def test_the_number_of_ranks(arguments: list[str], tp_size: str | None, num_ranks: int, tmp_path: Path) -> None:
    """Oracle: the run's own options come first, then the file's, then the default (2 without GPUs)."""
    file = tmp_path / "run.toml"
    file.write_text("[engine]\ntensor_parallel_size = 8\n")
    done = run(*(argument.format(file=file) for argument in arguments), "--print-config", tp_size=tp_size)
    assert done.returncode == 0, done.stderr
    assert f"tensor_parallel_size = {num_ranks}\n" in done.stdout


@pytest.mark.parametrize("arguments", [["--nproc-per-node", "2", "-tp", "4"], ["--nproc-per-node", "none"]])
def test_a_number_of_ranks_that_is_refused(arguments: list[str]) -> None:
    """Oracle: exit code 2 and a line that names the option."""
    done = run(*arguments)
    assert done.returncode == 2 and "the number of ranks is" in done.stderr, done.stderr


def run(*arguments: str, tp_size: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT if tp_size is None else {**ENVIRONMENT, "TP_SIZE": tp_size}
    return subprocess.run(
        ["scripts/serve", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=STOP_S, check=False,
    )  # fmt: skip
