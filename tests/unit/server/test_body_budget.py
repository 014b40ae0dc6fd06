"""The memory that the bodies of all requests share."""

from __future__ import annotations

import asyncio

import pytest

from tests.asgi import App, until
from tests.unit.server.test_server_api import error_of, serve
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.preparing import LARGE
from tp_engine.errors import ConfigError
from tp_engine.server import body_budget
from tp_engine.server.body_budget import BodyBudget, BodyRoom
from tp_engine.server.config import ServerConfig
from tp_engine.system.units import MIB

LONG = {"prompt": "x" * 2 * LARGE}


@pytest.mark.parametrize("headers", [{}, {"content-length": "", "transfer-encoding": "chunked"}])
def test_a_large_body_needs_room_and_a_small_one_does_not(headers: dict[str, str]) -> None:
    """Oracle: 503 with Retry-After while others hold the budget, in either API's shape; all of it comes back."""

    async def scenario(app: App) -> None:
        app.state.bodies.take(2 * MIB - 100)
        refused = await app.post("/v1/completions", LONG, **headers)
        assert refused.status == 503 and error_of(refused)["code"] == "no_room_for_body"
        assert int(refused.headers["retry-after"]) > 0 and refused.headers["connection"] == "close"
        message = await app.post("/v1/messages", LONG, **headers)
        assert (message.status, message.json()["error"]["type"]) == (503, "overloaded_error")
        assert message.headers["connection"] == "close"
        assert (await app.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)).status == 200
        app.state.bodies.give_back(2 * MIB - 100)
        assert error_of(await app.post("/v1/completions", LONG, **headers))["code"] == "context_length_exceeded"
        assert app.state.bodies.used == 0

    serve(scenario, config=ServerConfig(max_body_bytes=MIB, max_bodies_bytes=2 * MIB))


def test_a_body_is_held_until_its_answer_has_ended() -> None:
    """Oracle: what is used during a stream: the body without its first part."""

    async def scenario(app: App) -> None:
        body = {"prompt": [5], "max_tokens": 9, "stream": True, "ignore_eos": True, "user": "u" * LARGE}
        stream = app.start("POST", "/v1/completions", body)
        stream.may_read.clear()
        await until(lambda: app.state.limit.num_prompts > 0, "the body to have been read")
        assert app.state.bodies.used == len(stream.body) - LARGE
        stream.leave()
        await stream.ended()
        assert app.state.bodies.used == 0

    serve(scenario)


def test_a_body_that_stands_still_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: only while others need its room, only if nothing has come of it for a while, and the oldest first."""

    async def arrive(room: BodyRoom, size: int) -> None:
        async with room.arriving(timeout_s=100.0):
            room.grow(size)
            await asyncio.Event().wait()

    async def scenario() -> None:
        budget = BodyBudget(10 * LARGE)
        first, second, third = (BodyRoom(budget) for _ in range(3))
        waiting = [asyncio.ensure_future(arrive(room, 5 * LARGE)) for room in (first, second)]
        await asyncio.sleep(0)
        with pytest.raises(HttpError, match=r"hold 524,288 of 655,360 bytes, and 196,608 more"):
            third.grow(4 * LARGE)
        monkeypatch.setattr(body_budget, "_STILL_S", -1.0)
        third = BodyRoom(budget)
        third.grow(4 * LARGE)
        with pytest.raises(TimeoutError):
            await waiting[0]
        assert first.gave_way and not second.gave_way and budget.used == (4 + 3) * LARGE
        waiting[1].cancel()
        for room in (first, second, third):
            room.close()
        assert budget.used == 0

    asyncio.run(scenario())


def test_the_budget_holds_the_largest_body() -> None:
    """Oracle: what a body may have fits if no other is there."""
    with pytest.raises(ConfigError, match="max_bodies_bytes is 1048576, less than the 67108864 of max_body_bytes"):
        ServerConfig(max_bodies_bytes=MIB)
