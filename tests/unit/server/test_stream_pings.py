"""Streams that are silent: their headers and comments, and what becomes of an error that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.asgi import App, Reply, run_served, until
from tests.fake_engine import FakeEngine, echo
from tests.gated_engine import GatedEngine
from tests.tiny_server import chat_tokenizer
from tp_engine.server.config import ServerConfig

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
COMMENT = b": ping\n\n"
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abcdefgh"}),
    ("/v1/completions", {"prompt": ["abcdefgh", "b"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
]
# Clients of these give up a stream on which only comments come: its pings are events.
EVENTS = {"/v1/responses": "response.in_progress", "/v1/messages": "ping"}
OFTEN = ServerConfig(sse_keep_alive_interval=0.005)


def pings(path: str, parts: list[bytes]) -> list[bytes]:
    """Those of the parts that are pings; the first may begin the stream too."""
    sign = f"event: {EVENTS[path]}\n".encode() if path in EVENTS else COMMENT
    return [one for one in parts if sign in one]


def told(reply: Reply) -> list[Any]:
    """The events that are no pings; the numbers of all go on."""
    numbers = [one["sequence_number"] for one in reply.events if "sequence_number" in one]
    assert numbers == list(range(len(numbers)))
    return [one.keys() for one in reply.events if one.get("type") not in EVENTS.values()]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_silent_stream_sends_its_status_and_pings(path: str, body: dict[str, Any]) -> None:
    """Oracle: 200 and pings while no step has run; without the pings, the stream of a fast engine."""
    engine = GatedEngine(FakeEngine(echo))

    async def scenario(app: App) -> None:
        exchange = app.start("POST", path, body | {"stream": True})
        await until(lambda: len(pings(path, exchange.parts)) >= 3, "three pings")
        assert exchange.status == 200 and exchange.reply_headers["content-type"].startswith("text/event-stream")
        assert engine.num_steps == 0 and (path in EVENTS or set(exchange.parts) == {COMMENT})
        num_parts = len(exchange.parts)
        engine.allow(4)
        await until(lambda: exchange.parts[num_parts:] != pings(path, exchange.parts[num_parts:]), "an event")
        num_parts = len(exchange.parts)
        await until(lambda: bool(pings(path, exchange.parts[num_parts:])), "a ping between two tokens")
        engine.open()
        silent = await exchange.reply()
        assert told(silent) == told(await app.post(path, body | {"stream": True}))

    run_served(scenario, engine, chat_tokenizer(), OFTEN)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_an_error_after_a_ping_is_an_event(path: str, body: dict[str, Any]) -> None:
    """Oracle: the status has been sent; the client's strict types, and the error's code or message."""
    engine = GatedEngine(FakeEngine(echo, fail_at_step=1))

    async def scenario(app: App) -> None:
        exchange = app.start("POST", path, body | {"stream": True})
        await until(lambda: bool(pings(path, exchange.parts)), "a ping")
        engine.open()
        reply = await exchange.reply()
        assert reply.status == 200
        if path == "/v1/responses":
            for one in reply.events:
                EVENT.validate_python(one)
            names = [one["type"] for one in reply.events if one["type"] != "response.in_progress"]
            assert names == ["response.created", "response.failed"] and len(told(reply)) == 2
            assert "told to fail" in reply.events[-1]["response"]["error"]["message"]
        elif path == "/v1/messages":
            assert [one["type"] for one in reply.events if one["type"] != "ping"] == ["message_start", "error"]
            assert "told to fail" in reply.events[-1]["error"]["message"]
        else:
            assert [one["error"]["code"] for one in reply.events] == ["engine_dead"]
            assert reply.content.endswith(b"data: [DONE]\n\n")

    run_served(scenario, engine, chat_tokenizer(), OFTEN)


@pytest.mark.parametrize("interval_s", [0.0, 1e6])
def test_errors_before_the_interval_are_statuses(interval_s: float) -> None:
    """Oracle: a status, as without a stream; 0 never sends a comment."""

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/completions", {"prompt": "a", "stream": True})
        assert reply.status == 500 and reply.json()["error"]["code"] == "engine_dead"

    config = ServerConfig(sse_keep_alive_interval=interval_s)
    run_served(scenario, FakeEngine(echo, fail_at_step=1), chat_tokenizer(), config)


def test_a_client_that_leaves_a_silent_stream_ends_its_request() -> None:
    """Oracle: nothing runs afterwards, and the gate has seen the abort."""
    engine = GatedEngine(FakeEngine(echo))

    async def scenario(app: App) -> None:
        exchange = app.start("POST", "/v1/completions", {"prompt": "a", "stream": True})
        await until(lambda: COMMENT in exchange.parts and bool(engine.added), "a comment, and a request that runs")
        exchange.leave()
        await exchange.ended()
        await until(lambda: bool(engine.aborted), "the abort")
        assert app.state.limit.num_prompts == 0

    run_served(scenario, engine, chat_tokenizer(), OFTEN)
