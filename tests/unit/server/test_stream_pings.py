"""Streams that are silent: their headers and comments, and what becomes of an error that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine, echo
from tests.gated_engine import GatedEngine
from tests.tiny_server import chat_tokenizer
from tp_engine.server.config import ServerConfig

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PING = b": ping\n\n"
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
]
OFTEN = ServerConfig(sse_keep_alive_interval=0.005)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_silent_stream_sends_its_status_and_pings(path: str, body: dict[str, Any]) -> None:
    """Oracle: 200 and comments while no step has run; without the comments, the stream of a fast engine."""
    engine = GatedEngine(FakeEngine(echo))

    async def scenario(app: App) -> None:
        exchange = app.start("POST", path, body | {"stream": True})
        await until(lambda: exchange.parts.count(PING) >= 2, "two comments")
        assert exchange.status == 200 and exchange.reply_headers["content-type"].startswith("text/event-stream")
        assert engine.num_steps == 0 and set(exchange.parts) == {PING}
        engine.allow(1)
        await until(lambda: any(part != PING for part in exchange.parts), "an event")
        num_parts = len(exchange.parts)
        await until(lambda: PING in exchange.parts[num_parts:], "a comment between two tokens")
        engine.open()
        silent = await exchange.reply()
        fast = await app.post(path, body | {"stream": True})
        assert [one.keys() for one in silent.events] == [one.keys() for one in fast.events]

    run_served(scenario, engine, chat_tokenizer(), OFTEN)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_an_error_after_a_ping_is_an_event(path: str, body: dict[str, Any]) -> None:
    """Oracle: the status has been sent; the client's strict types, and the error's code or message."""
    engine = GatedEngine(FakeEngine(echo, fail_at_step=1))

    async def scenario(app: App) -> None:
        exchange = app.start("POST", path, body | {"stream": True})
        await until(lambda: PING in exchange.parts, "a comment")
        engine.open()
        reply = await exchange.reply()
        assert reply.status == 200
        if path == "/v1/responses":
            for one in reply.events:
                EVENT.validate_python(one)
            assert [one["type"] for one in reply.events] == [
                "response.created", "response.in_progress", "response.failed",
            ]  # fmt: skip
            assert "told to fail" in reply.events[-1]["response"]["error"]["message"]
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
        await until(lambda: PING in exchange.parts and bool(engine.added), "a comment, and a request that runs")
        exchange.leave()
        await exchange.ended()
        await until(lambda: bool(engine.aborted), "the abort")
        assert app.state.limit.num_prompts == 0

    run_served(scenario, engine, chat_tokenizer(), OFTEN)
