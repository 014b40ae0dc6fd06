"""The routers of SGLang's and vLLM's projects in front of two replicas: real HTTP processes with a fake engine."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.frontend import DEADLINE_S, RunningServer, new_engine, running_server, wait_until
from tests.e2e.serving import ROOT, free_port
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("TP_ENGINE_ROUTERS_PYTHON")
HEALTH = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")
NEEDS_ROUTERS = pytest.mark.skipif(
    PYTHON is None, reason="the routers have an environment of their own; run scripts/test_routers"
)
# Headers that keep requests together, by policy.
SESSIONS = {
    "consistent_hash": ("X-Session-Id", "X-User-Id"),
    "sticky_least_loaded": ("X-Session-Id", "X-User-Id"),
    "manual": ("X-SMG-Routing-Key",),
}
SHARED = "a prefix that all of these requests have in common, and that is much longer than their ends: "


@contextlib.contextmanager
def routing(module: str, policy: str, replicas: list[RunningServer], log: Path) -> Iterator[httpx.Client]:
    """A client of a router that has found both replicas."""
    assert PYTHON is not None
    port = free_port()
    urls = [replica.url for replica in replicas]
    ports = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", f"{module}.launch_router", "--worker-urls", *urls, *ports, "--policy", policy, *HEALTH],
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            wait_until(lambda: healthy_workers(client) == set(urls) or process.poll() is not None, "the router")
            assert process.poll() is None, log.read_text()[-4000:]
            yield client
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def healthy_workers(client: httpx.Client) -> set[str]:
    """The replicas that the router would send a request to."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        return {worker["url"] for worker in client.get("/workers").json()["workers"] if worker["is_healthy"]}
    return set()


def complete(client: httpx.Client, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4}
    return client.post("/v1/completions", json=body, headers=headers)


def spread(client: httpx.Client, replicas: list[RunningServer], prompts: list[str], **headers: str) -> list[int]:
    """How many of the requests each replica got, by its own count."""
    before = [num_requests(replica) for replica in replicas]
    for prompt in prompts:
        reply = complete(client, prompt, **headers)
        assert reply.status_code == 200, reply.text
    return [num_requests(replica) - old for replica, old in zip(replicas, before, strict=True)]


def num_requests(replica: RunningServer) -> int:
    lines = replica.client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total")))


def check_stream(client: httpx.Client, replicas: list[RunningServer]) -> None:
    """The first event comes while the engine still runs the request; all events come, and the request's own id."""
    body = {"model": "demo", "prompt": "x" * 40, "max_tokens": 40, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as reply:
        lines = (line for line in reply.iter_lines() if line)
        first = next(lines)
        assert any(replica.engine.has_unfinished for replica in replicas)
        rest = list(lines)
    assert '"cmpl-mine"' in first and len(rest) >= 40 and rest[-1] == "data: [DONE]"


@NEEDS_ROUTERS
@pytest.mark.parametrize(
    ("module", "policies"),
    [
        ("sglang_router", ["round_robin", "power_of_two", "manual", "cache_aware"]),
        ("vllm_router", ["consistent_hash", "sticky_least_loaded", "cache_aware"]),
    ],
)
def test_two_replicas_behind_a_router(module: str, policies: list[str], tmp_path: Path) -> None:
    """Oracle: the replicas' own counts of requests; every request is answered once a dead replica is taken out.

    Before that, both routers try a refused connection elsewhere, but may answer 500 for one that they had kept open.
    """
    config = ServerConfig(port=0, metrics_prefix=("vllm",), generation_config="vllm")
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(running_server(new_engine(0.01), config)) for _ in range(2)]
        for policy in policies[:-1]:
            with routing(module, policy, replicas, tmp_path / policy) as client:
                counts = spread(client, replicas, [f"{letter} alone" for letter in "abcdef"])
                assert sum(counts) == 6
                assert policy != "round_robin" or counts == [3, 3]
                for header in SESSIONS.get(policy, ()):
                    sessions = [spread(client, replicas, ["a", "b", "c"], **{header: f"s{n}"}) for n in range(8)]
                    assert all(sorted(one) == [0, 3] for one in sessions), f"{header}: a session stays"
        with routing(module, policies[-1], replicas, tmp_path / policies[-1]) as client:
            models = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert "demo" in models
            assert sorted(spread(client, replicas, [SHARED + str(number) for number in range(8)])) == [0, 8]
            check_stream(client, replicas)
            victim = replicas[0] if num_requests(replicas[0]) > num_requests(replicas[1]) else replicas[1]
            victim.process.kill()
            (other,) = {replica.url for replica in replicas} - {victim.url}
            wait_until(lambda: healthy_workers(client) == {other}, "the dead replica to be taken out")
            assert [complete(client, SHARED + str(number)).status_code for number in range(8)] == [200] * 8


@NEEDS_ROUTERS
def test_the_commands_of_the_document(tmp_path: Path) -> None:
    """Oracle: a sum by hand, through the router of docs/replicas.md before two servers with the demo model."""
    assert PYTHON is not None
    text = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n([^`]*sglang_router[^`]*)```", text)
    ports = {number: str(free_port()) for number in ("8000", "8001", "8002")}
    lines = re.sub("|".join(ports), lambda found: ports[found[0]], block.replace("\\\n", " ")).splitlines()
    programs = {"tp-engine": [sys.executable, "-m", "tp_engine"], "python": [PYTHON]}
    urls = {f"http://127.0.0.1:{ports[number]}" for number in ("8001", "8002")}
    with contextlib.ExitStack() as stack:
        for number, line in enumerate(lines):
            program, *arguments = shlex.split(line.removesuffix("&"))
            extra = ["--prometheus-port", str(free_port())] if program == "python" else ["--device=cpu"]
            output = stack.enter_context((tmp_path / str(number)).open("w"))
            process = subprocess.Popen(
                [*programs[program], *arguments, *extra],
                cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            stack.callback(end, process)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{ports['8000']}", timeout=DEADLINE_S))
        wait_until(lambda: healthy_workers(client) == urls, "the router and its servers", 120.0)
        body = {"model": "demo_model", "messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
        for _ in range(4):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "46"


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server or a router with all that it has started."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DEADLINE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
