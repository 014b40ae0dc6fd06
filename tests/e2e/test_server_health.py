"""Health is true: the HTTP process's answers after its engine dies, hangs or is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.frontend import DEADLINE_S, RunningServer, new_engine, running_server, wait_until
from tests.gated_engine import GatedEngine
from tp_engine.ipc.pulse import Pulse
from tp_engine.server.frontend_process import check_frontend

SLOW = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
HARD_LIMIT_S = 7.0


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    pulse = Pulse.create()
    yield pulse
    pulse.stop_sharing()


def serving(pulse: Pulse) -> dict[str, Any]:
    return {"pulse_address": pulse.address, "hard_limit_s": HARD_LIMIT_S}


def status(server: RunningServer, path: str) -> tuple[int, str | None]:
    """Status and error code."""
    reply = server.client.get(path)
    return reply.status_code, reply.json().get("error", {}).get("code")


def test_a_hanging_engine_turns_health_red_and_back(pulse: Pulse) -> None:
    """Oracle: rank 0's watchdog sets the flag at the soft limit; new requests are refused while it is set.  No answer
    waits for a step of the engine."""
    engine: Any = GatedEngine(new_engine())
    with running_server(engine, **serving(pulse)) as server:
        asking = threading.Thread(target=server.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 2}))
        asking.start()
        wait_until(lambda: engine.added, "a request that is held up")
        assert status(server, "/health")[0] == status(server, "/ready")[0] == 200  # no beat yet
        pulse.beat(hangs=False)
        assert status(server, "/health")[0] == 200
        pulse.beat(hangs=True)
        for path in ("/health", "/ready", "/v1/models"):
            assert status(server, path) == (503, "engine_hangs")
        assert status(server, "/live")[0] == 200
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
        pulse.beat(hangs=False)
        assert status(server, "/health")[0] == status(server, "/ready")[0] == 200
        engine.open()
        asking.join(DEADLINE_S)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_stopped_rank_0_is_given_up(pulse: Pulse) -> None:
    """Oracle: without a beat, health is red after 5 s; at the hard limit the request, which would run for longer than
    this test waits, fails, and the exit code is 1."""
    with running_server(new_engine(step_delay_s=0.2), **serving(pulse)) as server:
        pulse.beat(hangs=False)
        began_s = time.monotonic()
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", SLOW)))
        asking.start()
        wait_until(lambda: status(server, "/health") == (503, "engine_hangs"), "health to turn red")
        assert time.monotonic() - began_s > 4.5
        asking.join(DEADLINE_S)
        assert answers[0].status_code >= 500 and "no sign of life" in answers[0].text
        assert time.monotonic() - began_s >= HARD_LIMIT_S
        with pytest.raises(ChildProcessError, match="exit code 1"):
            wait_until(lambda: check_frontend(server.process), "the HTTP process to end")


def test_a_dead_engine_is_never_answered_200(pulse: Pulse) -> None:
    """Oracle: the engine raises during a request; the request fails, and every later answer is red."""
    engine = new_engine(step_delay_s=0.02)
    with running_server(engine, **serving(pulse)) as server:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", SLOW)))
        asking.start()
        wait_until(lambda: engine.has_unfinished, "the request to run")
        engine.fail_at_step = engine.num_steps + 3
        asking.join(DEADLINE_S)
        assert answers[0].status_code >= 500
        with pytest.raises((httpx.TransportError, ChildProcessError)):
            while True:
                assert status(server, "/health")[0] == 503
                check_frontend(server.process)
