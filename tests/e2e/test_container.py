"""The commands of deploy/ as they stand, with the demo model on CPUs: probes, readiness for systemd, and the drain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.deployed import container, entrypoint, filled, health_check
from tests.e2e.frontend import wait_until
from tests.e2e.serving import ROOT, free_port
from tp_engine.config import DEMO_MODEL

pytestmark = pytest.mark.slow

# What replaces the manifest's options, as later options do.
SMALL = ["--host=127.0.0.1", f"--model={DEMO_MODEL}", "--device=cpu", "--num-gpu-blocks-override=128",
         "--max-num-seqs=4", "--served-model-name", "demo"]  # fmt: skip
START_S = 300.0


@contextlib.contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job of the interpreter's own environment, killed at the end if it still runs."""
    programs = {"tp-engine": ["-m", "tp_engine"], "torchrun": ["-m", "torch.distributed.run"]}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *programs[command[0]], *command[1:]],
            cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def status(client: httpx.Client, path: str) -> int:
    """0 while the port is not bound."""
    with contextlib.suppress(httpx.ConnectError):
        return client.get(path).status_code
    return 0


def probe_paths(maker: str) -> list[str]:
    return [container(maker)[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "startup", "readiness")]


@pytest.mark.timeout(400)
def test_the_entry_point_of_the_image(tmp_path: Path) -> None:
    """Oracle: the table of probes in docs/quickstart.md, the exit code of a drain, and systemd's protocol.

    Rank 0 stops itself while it loads, so that the probes can be asked before the server is ready.
    """
    port = free_port()
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    command = [*entrypoint(), *container("deployment")["args"], *SMALL, f"--port={port}", "--tensor-parallel-size=2"]
    log, (live, started, ready) = tmp_path / "log", probe_paths("deployment")
    with told, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        told.bind(f"\0tp_engine_{os.getpid()}")
        told.settimeout(START_S)
        settings = {"NOTIFY_SOCKET": f"@tp_engine_{os.getpid()}", "TP_ENGINE_FAULT": "0:load:stop"}
        with running(command, log, **settings) as process:
            wait_until(lambda: status(client, live) == 200, "the port", START_S)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the load", START_S)
            assert [status(client, path) for path in (started, ready)] == [503, 503]
            assert docker_says(port) == 1
            process.send_signal(signal.SIGCONT)
            assert told.recv(100) == b"READY=1", log.read_text()[-3000:]
            assert [status(client, path) for path in (live, started, ready)] == [200, 200, 200]
            assert docker_says(port) == 0
            body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "46"
            text = client.get("/metrics").text
            assert "\nvllm:num_requests_running{" in text and "\ntp_engine:num_requests_running{" in text
            process.send_signal(signal.SIGTERM)
            assert told.recv(100) == b"STOPPING=1"
            assert process.wait(60) == 0, log.read_text()[-3000:]


def docker_says(port: int) -> int:
    """The exit code of the image's health check."""
    command = [word.replace(":8000/", f":{port}/") for word in health_check()]
    return subprocess.run([sys.executable, *command[1:]], capture_output=True, timeout=30).returncode


@pytest.mark.timeout(400)
def test_the_commands_of_a_group_of_two_pods(tmp_path: Path) -> None:
    """Oracle: the probes of the leader, a sum by hand, and a stream that goes on to its end although all pods are told
    to stop at once; no pod is left."""
    port, replaced = free_port(), {"--nproc-per-node=8": "--nproc-per-node=1"}
    replaced["--master-port=29500"] = f"--master-port={free_port()}"
    live, started, ready = probe_paths("leader")
    with contextlib.ExitStack() as stack:
        pods = []
        for index, maker in enumerate(("leader", "worker")):
            group = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "127.0.0.1"}
            given = filled(container(maker)["command"], group)
            assert replaced.keys() <= set(given)
            command = [*(replaced.get(word, word) for word in given), *SMALL, f"--port={port}"]
            pods.append(stack.enter_context(running(command, tmp_path / maker)))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))
        deadline_s = time.monotonic() + START_S
        while status(client, ready) != 200:
            assert all(pod.poll() is None for pod in pods) and time.monotonic() < deadline_s, logs_of(tmp_path)
            time.sleep(0.1)
        assert [status(client, path) for path in (live, started)] == [200, 200]
        asked = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
        answer = client.post("/v1/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "46"
        body = {"prompt": "12+34=", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            for pod in reversed(pods):
                pod.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2], logs_of(tmp_path)
        for pod in pods:
            pod.wait(60)
        wait_until(lambda: status(client, live) == 0, "the end of the server")


def logs_of(folder: Path) -> str:
    """The ends of the pods' logs."""
    return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.iterdir()))
