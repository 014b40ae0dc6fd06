"""The serving job as a process: start, signals, deaths.  The engine is a fake; everything else is real."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.frontend import DEADLINE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
END_S = 50.0
LONG_START_S = 200.0


class Job:
    """A running job and its output so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None, repr(text))
        assert text in self.output, self.output

    def url(self) -> str:
        self.wait_for("12+34=")
        found = re.search(r"at (http://\S+),", self.output)
        assert found is not None
        return found[1]

    def frontend(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def ends_with(self, code: int, within_s: float = END_S) -> None:
        assert self.process.wait(within_s) == code, self.output


@contextlib.contextmanager
def started(*options: str, delay_s: float = 0.0, gate: Path | None = None) -> Iterator[Job]:
    """A job; its engine starts after ``delay_s``, and makes no step while the file ``gate`` exists."""
    environment = {**os.environ, "TEST_START_DELAY_S": str(delay_s), "TEST_GATE": str(gate or "")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.serve_fake", *options],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Job(process)
    finally:
        process.kill()
        process.wait()


def test_first_signal_drains_and_second_is_not_needed(tmp_path: Path) -> None:
    """Oracle: the running request is answered whole, a new one gets 503, exit code 0, the process gone."""
    gate = tmp_path / "gate"
    gate.touch()
    with started("--port", "0", "--shutdown-timeout-s", "25", gate=gate) as job:
        url = job.url()
        frontend = job.frontend()
        answers = []

        def ask() -> None:
            answers.append(httpx.post(url + "/v1/completions", json=SLOW, timeout=DEADLINE_S))

        asking = threading.Thread(target=ask)
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as late:
            assert late.get("/ready").status_code == 200
            asking.start()
            wait_until(lambda: 'num_requests_running{model_name="demo_model"} 1.0' in late.get("/metrics").text, "it")
            job.process.send_signal(signal.SIGTERM)
            wait_until(lambda: late.get("/ready").status_code == 503, "the drain")
            assert late.get("/health").status_code == 200  # a draining server is healthy
            refused = late.post("/v1/completions", json=SLOW)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            gate.unlink()
        asking.join(DEADLINE_S)
        job.ends_with(0)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 200
        assert not frontend.is_running()


@pytest.mark.slow
def test_a_beam_search_is_finished_in_a_drain(tmp_path: Path) -> None:
    """Oracle: the whole answer, although each of its rounds is a new request to the engine; exit code 0."""
    gate = tmp_path / "gate"
    gate.touch()
    with started("--port", "0", "--shutdown-timeout-s", "25", gate=gate) as job:
        url = job.url()
        answers = []
        body = {"prompt": "x", "max_tokens": 60, "n": 2, "ignore_eos": True, "use_beam_search": True}

        def ask() -> None:
            answers.append(httpx.post(url + "/v1/completions", json=body, timeout=DEADLINE_S))

        asking = threading.Thread(target=ask)
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as late:
            asking.start()
            wait_until(lambda: late.get("/load").json()["server_load"] == 1, "it")
            job.process.send_signal(signal.SIGTERM)
            wait_until(lambda: late.get("/ready").status_code == 503, "the drain")
            gate.unlink()
        asking.join(DEADLINE_S)
        job.ends_with(0)
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["usage"]["completion_tokens"] == 120


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Oracle: the job ends long before the drain would, while a request is held up."""
    gate = tmp_path / "gate"
    with started("--port", "0", "--shutdown-timeout-s", "25", gate=gate) as job:
        url = job.url()
        body = SLOW | {"max_tokens": 1000, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=DEADLINE_S) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            gate.touch()
            began_s = time.monotonic()
            job.process.send_signal(signal.SIGINT)
            job.wait_for("stopping")
            job.process.send_signal(signal.SIGINT)
            job.ends_with(0)
            assert time.monotonic() - began_s < 20


def test_a_signal_while_loading_ends_the_job() -> None:
    """Oracle: exit code 0 long before the engine has started; until then the port answers that it is not ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started("--port", str(port), delay_s=LONG_START_S) as job:
        job.wait_for("loading")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            ready = client.get("/ready")  # waits in the socket's queue for the frontend
            assert ready.status_code == 503 and ready.json()["error"]["code"] == "not_ready"
            assert client.get("/live").status_code == 200
            for path in ("/health", "/ping", "/v1/models"):
                answer = client.get(path)
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready", path
                assert int(answer.headers["retry-after"]) > 0
            assert client.post("/v1/completions", json=SLOW).status_code == 503
        job.process.send_signal(signal.SIGTERM)
        job.ends_with(0)


def test_the_port_file_is_there_from_the_bound_port_to_the_end(tmp_path: Path) -> None:
    """Oracle: the port in the file answers while the model loads; a stop removes the file and leaves no other."""
    file = tmp_path / "port"
    file.write_text("1\n")  # as a killed server leaves it
    with started("--port", "0", "--port-file", str(file), delay_s=LONG_START_S) as job:
        wait_until(lambda: file.read_text() != "1\n", "the port")
        assert httpx.get(f"http://127.0.0.1:{int(file.read_text())}/live", timeout=DEADLINE_S).status_code == 200
        job.process.send_signal(signal.SIGTERM)
        job.ends_with(0)
        job.wait_for("stopped")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_port_file_is_removed_by_a_stop_that_can_not_wait(tmp_path: Path) -> None:
    """Oracle: the file is gone after two signals while a request runs."""
    file, gate = tmp_path / "port", tmp_path / "gate"
    with started("--port", "0", "--port-file", str(file), gate=gate) as job:
        body = SLOW | {"max_tokens": 1000, "stream": True}
        with httpx.stream("POST", job.url() + "/v1/completions", json=body, timeout=DEADLINE_S) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            gate.touch()
            job.process.send_signal(signal.SIGINT)
            job.wait_for("stopping")
            job.process.send_signal(signal.SIGINT)
            job.ends_with(0)
        assert list(tmp_path.iterdir()) == [gate]


def test_a_taken_port_is_known_before_loading() -> None:
    """Oracle: exit code 1, one line with the port and the remedy; no model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started("--port", str(port)) as job:
            job.ends_with(1, DEADLINE_S)
            job.wait_for(f"127.0.0.1:{port} is in use")
            assert "--port" in job.output and "loading" not in job.output and "Traceback" not in job.output


def test_death_of_the_frontend_ends_the_job() -> None:
    """Oracle: exit code 1, and the reason in the log."""
    with started("--port", "0") as job:
        job.url()
        job.frontend().kill()
        job.ends_with(1)


def test_death_of_the_frontend_while_loading_ends_the_job() -> None:
    """Oracle: exit code 1 long before the engine has started."""
    with started("--port", "0", delay_s=LONG_START_S) as job:
        job.wait_for("loading")
        job.frontend().kill()
        job.ends_with(1)
        job.wait_for("while the model loads")


def test_death_of_rank_0_ends_the_frontend() -> None:
    """Oracle: the frontend is gone after a SIGKILL, which no process can catch."""
    with started("--port", "0") as job:
        job.url()
        frontend = job.frontend()
        job.process.kill()
        wait_until(lambda: not frontend.is_running(), "the frontend to end")


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        ["--schedule-policy", "lpm"],
        ["--ssl-cert-reqs", "2"],
        ["--max-num-seq", "2"],
        ["--port", "0", "--port-file", "/none/port"],
        ["--uds", "/tmp/none", "--port-file", "/tmp/none.port"],
    ],
)
def test_configuration_errors_end_at_once(option: list[str]) -> None:
    """Oracle: exit code 2, one message, nothing started."""
    with started(*option) as job:
        job.ends_with(2, DEADLINE_S)
        job.wait_for("serve.py: error:")
        assert "Traceback" not in job.output and "loading" not in job.output
