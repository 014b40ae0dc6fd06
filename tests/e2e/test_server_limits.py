"""The server under pressure: large bodies, full queues, wild bodies, a failing engine."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.frontend import DEADLINE_S, new_engine, running_server, unfinished_body, wait_until
from tp_engine.server.config import ServerConfig
from tp_engine.server.frontend_process import check_frontend
from tp_engine.system.units import MIB

MAX_BODY_BYTES = 20_000


def test_bodies_are_bounded_announced_or_not() -> None:
    """Oracle: 413 in the OpenAI shape; the server goes on."""
    with running_server(config=ServerConfig(port=0, max_body_bytes=MAX_BODY_BYTES)) as server:
        body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
        for content in (body, iter([body[:5000]] * 10)):  # an iterator is sent in pieces, without a length
            answer = server.client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert server.post("/v1/completions", {"prompt": "ab"}).json()["choices"][0]["text"] == "ab"


def test_bodies_share_one_budget_of_memory() -> None:
    """Oracle: the memory of the process, which stays within the budget and comes back; small requests are served
    meanwhile, and a large one passes those that stand still: it is refused for its length."""
    config = ServerConfig(port=0, max_body_bytes=8 * MIB, max_bodies_bytes=48 * MIB)
    with running_server(config=config) as server, contextlib.ExitStack() as stack:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        large = json.dumps({"prompt": "x" * (7 * MIB)}).encode()
        for _ in range(16):
            stack.enter_context(unfinished_body(server, 7 * MIB))
        assert server.post("/v1/completions", {"prompt": "ab"}).json()["choices"][0]["text"] == "ab"
        assert process.memory_info().rss - before < 2 * config.max_bodies_bytes
        wait_until(lambda: server.client.post("/v1/completions", content=large).status_code == 400, "room")
        stack.close()
        wait_until(lambda: process.memory_info().rss - before < config.max_bodies_bytes / 2, "memory to come back")


def test_a_full_queue_answers_429_and_recovers() -> None:
    """Oracle: 64 requests run and 2 are queued; the next one is refused with Retry-After, and served once they are
    gone."""
    engine = new_engine(step_delay_s=0.01)
    with running_server(engine, ServerConfig(port=0, max_num_queued_reqs=2)) as server:
        body = {"prompt": ["x"] * 66, "max_tokens": 1000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            for extra in ({}, {"stream": True}):
                refused = server.post("/v1/completions", {"prompt": "ab"} | extra)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
                assert refused.json()["error"]["type"] == "rate_limit_error"
        server.wait_idle()
        assert server.post("/v1/completions", {"prompt": "ab"}).status_code == 200


@pytest.mark.slow
def test_health_answers_quickly_under_load() -> None:
    """Oracle: the median of many probes is a fraction of what a request takes, while 64 long prompts are tokenized and
    streamed; a busy machine makes both slower."""
    with running_server(new_engine(step_delay_s=0.002)) as server:
        stop = threading.Event()
        taken_s: dict[str, list[float]] = {"/health": [], "/v1/completions": []}

        def load() -> None:
            with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
                while not stop.is_set():
                    began_s = time.monotonic()
                    client.post("/v1/completions", json={"prompt": ["y" * 900] * 8, "max_tokens": 20})
                    taken_s["/v1/completions"].append(time.monotonic() - began_s)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.has_unfinished, "the first request")
        while len(taken_s["/health"]) < 30 or len(taken_s["/v1/completions"]) < 8:
            began_s = time.monotonic()
            assert server.client.get("/health").status_code == 200
            taken_s["/health"].append(time.monotonic() - began_s)
        stop.set()
        for thread in threads:
            thread.join()
        probe_s, request_s = (statistics.median(found) for found in taken_s.values())
        assert probe_s < request_s / 2, (probe_s, request_s)


def test_no_body_breaks_the_server() -> None:
    """Oracle: every answer is 200 or a client error in the OpenAI shape; a good request works afterwards."""
    rng = random.Random(7)
    with running_server() as server:
        for _ in range(400):
            path = rng.choice(["/v1/completions", "/v1/chat/completions"])
            answer = server.client.post(path, content=wild_body(rng))
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.status_code != 200:
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        server.wait_idle()
        assert server.post("/v1/completions", {"prompt": "ab"}).json()["choices"][0]["text"] == "ab"


VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "😀" * 50,
    [],
    {},
    [[]],
    [None],
    ["a", 3],
    [5, 6],
    [10**9],
    {"5": 1},
    {"x": {}},
    [{"role": "user", "content": "hi"}],
)
NAMES = (
    "prompt",
    "messages",
    "model",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "cache_salt",
    "priority",
    "stream_options",
    "repetition_penalty",
    "chat_template_kwargs",
    "continue_final_message",
    "unknown",
)


def wild_body(rng: random.Random) -> bytes:
    """A request with arbitrary values in up to three fields."""
    body: dict[str, Any] = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}
    for _ in range(rng.randint(0, 3)):
        body[rng.choice(NAMES)] = rng.choice(VALUES)
    return json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_fails_is_reported(stream: bool) -> None:
    """Oracle: the running request ends with an error; health turns red, and the server ends."""
    engine = new_engine(step_delay_s=0.002)
    engine.fail_at_step = 20
    with running_server(engine) as server:
        body = {"prompt": "x", "max_tokens": 100, "stream": stream}
        answer = server.post("/v1/completions", body)
        if stream:
            events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        else:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "engine_dead"
        wait_until(lambda: has_ended(server), "the frontend to end")


def has_ended(server: Any) -> bool:
    try:
        check_frontend(server.process)
    except ChildProcessError:
        return True
    return False
