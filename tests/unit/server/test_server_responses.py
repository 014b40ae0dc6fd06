"""``/v1/responses`` through the application in this process: what happens on failures."""

from __future__ import annotations

import asyncio
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.asgi import App, run_served, until
from tests.e2e.frontend import INFO
from tests.e2e.scripted import say
from tests.fake_engine import FakeEngine
from tests.tiny_server import chat_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATH = "/v1/responses"


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(say, model_info=INFO, **options)


def test_an_engine_that_dies_ends_a_stream_as_failed() -> None:
    """Oracle: the client's strict types; the last event says that the response failed, and why."""

    async def scenario(app: App) -> None:
        reply = await app.post(PATH, {"input": "x" * 300, "stream": True})
        assert reply.status == 200
        for one in reply.events:
            EVENT.validate_python(one)
        last = reply.events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "told to fail" in last["response"]["error"]["message"]

    run_served(scenario, engine(fail_at_step=20), chat_tokenizer())


def test_an_engine_that_dies_before_the_first_token_is_an_error() -> None:
    """Oracle: a status and the OpenAI shape, also for a stream, because nothing has been sent."""

    async def scenario(app: App) -> None:
        reply = await app.post(PATH, {"input": "x", "stream": True})
        assert reply.status == 500 and reply.json()["error"]["code"] == "engine_dead"

    run_served(scenario, engine(fail_at_step=1), chat_tokenizer())


def test_an_aborted_response_is_cancelled() -> None:
    """Oracle: the reference's status; the text so far is kept, streamed or not."""

    async def scenario(app: App) -> None:
        for stream in (False, True):
            body = {"input": "x" * 400, "stream": stream, "request_id": f"mine-{stream}"}
            exchange = app.start("POST", PATH, body)
            await until(lambda: app.service.engine.has_unfinished, "the request to run")
            await asyncio.sleep(0.02)
            assert (await app.post("/abort", {"request_ids": [f"mine-{stream}"]})).status == 200
            reply = await exchange.reply()
            response = reply.events[-1]["response"] if stream else reply.json()
            assert response["id"] == f"resp_mine-{stream}" and response["status"] == "cancelled"
            assert all(item["status"] == "incomplete" for item in response["output"])

    run_served(scenario, engine(step_delay_s=0.002), chat_tokenizer())


def test_nothing_is_stored() -> None:
    """Oracle: 404 with the reason, for reading and deleting; the answer's ``store`` is false."""

    async def scenario(app: App) -> None:
        response = (await app.post(PATH, {"input": "x", "store": True, "max_output_tokens": 2})).json()
        assert response["store"] is False
        for method in ("GET", "DELETE"):
            reply = await app.start(method, f"{PATH}/{response['id']}").reply()
            assert reply.status == 404 and reply.json()["error"]["code"] == "response_not_found"

    run_served(scenario, engine(), chat_tokenizer())
