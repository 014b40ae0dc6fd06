"""Query parameters of the routes for operators: each is obeyed, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import App, until
from tests.fake_engine import FakeEngine, arith
from tests.unit.server.test_access import routes
from tests.unit.server.test_server_api import error_of, ids, serve


def test_no_route_ignores_a_parameter() -> None:
    """Oracle: 400 with the parameter's name from every route but the page; nothing has reached the engine."""
    acting = [one for one in routes() if one[1] != "/" and not one[1].startswith("/page/")]
    assert len(acting) > 60

    async def scenario(app: App) -> None:
        for method, path in acting:
            reply = await app.start(method, f"{path}?qzx=1", {} if method == "POST" else None).reply()
            assert reply.status == 400, (method, path, reply.content)
            assert f"{path} has no query parameter 'qzx'; it takes " in reply.json()["error"]["message"]
            assert path.startswith("/v1/messages") or error_of(reply)["param"] == "qzx"
        assert isinstance(app.service.engine, FakeEngine) and not app.service.engine.orders

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/wake_up?tags=nonsense", "tags has 'nonsense'; it must be some of weights, kv_cache, scheduling"),
        ("/wake_up?tags=kv_cache&tags=", "tags has ''"),
        ("/wake_up?tag=kv_cache", "it takes tags"),
        ("/sleep?level=2", "level is 2"),
        ("/sleep?level=", "level is "),
        ("/sleep?mode=never", "mode is 'never'"),
        ("/pause?mode=never", "mode is 'never'"),
        ("/pause?clear_cache=perhaps", "clear_cache is perhaps"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests is 2"),
        ("/reset_prefix_cache?reset_connector=true", "it takes reset_running_requests, reset_external"),
        ("/v1/chat/completions?model=gpt-4&api-version=1", "/v1/chat/completions has no query parameter 'model'"),
        ("/v1/files?limit=2", "it takes none"),
    ],
)
def test_values_that_mean_nothing_are_refused(path: str, words: str) -> None:
    """Oracle: the value and the rule in the error."""

    async def scenario(app: App) -> None:
        reply = await app.post(path, None)
        assert reply.status == 400 and words in error_of(reply)["message"]
        info = (await app.get("/weight_info")).json()
        assert not info["is_paused"] and not info["is_sleeping"]

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files?limt=2", 400),
        ("/health?full=1", 400),
        ("/v1/models?client_version=0.50.0", 200),
        ("/v1/models/demo?api-version=2026-01-01", 200),
        ("/?theme=dark", 200),
        ("/nonsense?limit=2", 404),
        ("/v1/files/?limt=2", 400),
        ("/engine?samples=2", 200),
    ],
)
def test_parameters_of_routes_that_read(path: str, status: int) -> None:
    """Oracle: what clients of Azure, Codex and a browser send, which changes nothing; all else by name."""

    async def scenario(app: App) -> None:
        for method in ("GET", "HEAD"):
            assert (await app.start(method, path).reply()).status == status

    serve(scenario)


def test_what_anthropics_clients_send_is_no_order() -> None:
    """Oracle: ``?beta=true`` is answered; an error of another parameter has Anthropic's form."""

    async def scenario(app: App) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (await app.post("/v1/messages?beta=true", body)).status == 200
        refused = await app.post("/v1/messages?stream=true", body)
        assert refused.status == 400 and refused.json()["type"] == "error"

    serve(scenario)


def test_the_server_info_has_one_form() -> None:
    """Oracle: vLLM's parameter, whose default is text there and JSON here."""

    async def scenario(app: App) -> None:
        info = await app.get("/server_info?config_format=json")
        assert info.status == 200 and info.json()["kernel_choices"] == "own"
        assert (await app.get("/server_info?config_format=text")).status == 400

    serve(scenario)


def test_an_engine_wakes_up_by_tags() -> None:
    """Oracle: what reaches the ranks, and who runs: the memory comes back with ``kv_cache`` alone, as a trainer wants
    that still has it; vLLM's names."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, FakeEngine)

        async def wake(*tags: str) -> Any:
            reply = await app.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), None)
            return reply.json() if reply.status == 200 else error_of(reply)["message"]

        await app.post("/sleep?level=1&mode=wait", None)
        assert await wake("weights") == {"is_sleeping": True} and engine.orders == ["sleep"]
        assert (await app.get("/weight_info")).json()["is_paused"]
        assert "add kv_cache to tags" in await wake("scheduling")
        held = app.start("POST", "/v1/completions", {"prompt": ids("a"), "max_tokens": 2})
        await until(lambda: app.state.limit.num_prompts == 1, "the request to come")
        assert await wake("weights", "kv_cache") == {"is_sleeping": False} and engine.orders == ["sleep", "wake_up"]
        assert (await held.reply()).json()["usage"]["completion_tokens"] == 2
        await app.post("/sleep?level=0", None)
        assert await wake("weights") == {"is_sleeping": False} and engine.is_paused
        assert await wake("scheduling") == {"is_sleeping": False} and not engine.is_paused
        assert engine.orders == ["sleep", "wake_up"]

    serve(scenario, FakeEngine(arith))


def test_the_cache_is_reset_while_requests_run() -> None:
    """Oracle: refused, unless the parameter says that running requests are computed again; a pause of others stays."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, FakeEngine)
        running = app.start("POST", "/v1/completions", {"prompt": ids("a"), "max_tokens": 300, "ignore_eos": True})
        await until(lambda: engine.num_steps > 2, "a step")
        assert (await app.post("/reset_prefix_cache?reset_running_requests=true", None)).status == 200
        assert not engine.is_paused
        assert (await running.reply()).json()["usage"]["completion_tokens"] == 300
        await app.post("/pause?wait_for_inflight_requests=true&clear_cache=false", None)
        assert (await app.post("/reset_prefix_cache?reset_running_requests=1&reset_external=true", None)).status == 200
        assert engine.is_paused

    serve(scenario, FakeEngine(arith, step_delay_s=0.002))
