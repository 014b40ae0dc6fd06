"""Nothing of a client's size runs on the event loop: every route, every field, with a large value.

The routes and their fields are those of the application's own description, so a new one is tried without a line here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.batches.store import BatchStore
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.main import share_interpreter
from tp_engine.server.state import ServerState

# The promise is half a second of ``/health`` on idle cores; the values here are a fiftieth of the largest body.
MOST_S = 0.2
SIZE = 1 << 18
PATIENCE_S = 3.0
# Fields that a body must have, with a good value: so others are looked at, too.
GOOD: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "query": "a",
    "documents": ["a"],
    "queries": "a",
    "text_1": "a",
    "text_2": "a",
    "tokens": [1],
    "max_tokens": 2,
}


def _description() -> dict[str, Any]:
    return create_app(ServerState(ServerConfig(batch_storage_dir="none"), ("demo",))).openapi()


def _bodies(description: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The routes that take JSON, and the schemas of their bodies; one route of each body."""
    seen = set()
    for path, methods in sorted(description["paths"].items()):
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None and json.dumps(body["schema"]) not in seen:
            seen.add(json.dumps(body["schema"]))
            yield path, _resolved(body["schema"], description)


def _resolved(schema: dict[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = description["components"]["schemas"][name] if name else schema
    return found


def _large(schema: dict[str, Any], description: dict[str, Any]) -> Iterator[Any]:
    """Large values of each type that a field may have: of many small parts, and of one long one."""
    schema = _resolved(schema, description)
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _large(one, description)
    kind, any_kind = schema.get("type"), not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}
    if kind == "string" or any_kind:
        yield "a b" * (SIZE // 3)
    if kind == "array" or any_kind:
        items = _resolved(schema.get("items", {}), description)
        small = _small(items, description)
        yield [small] * (SIZE // (2 + len(json.dumps(small))))
    if kind == "object" or any_kind:
        yield {f"k{number}": number for number in range(SIZE // 16)}
        yield {"type": "object", "x": {"$ref": "#" + "/a" * (SIZE // 4)}, "anyOf": [{"$ref": "#/x"}] * (SIZE // 32)}


def _small(schema: dict[str, Any], description: dict[str, Any]) -> Any:
    schema = _resolved((schema.get("anyOf") or [schema])[0], description)
    required = {name: GOOD.get(name, "a") for name in schema.get("required", ())}
    return {"string": "a", "integer": 1, "number": 1.0, "object": required, "array": [1]}.get(
        schema.get("type", ""), "a"
    )


def _kind(name: str, field: dict[str, Any]) -> str:
    """A field of this name and schema is read in one way, by the same code, whatever the route."""
    return f"{name} {json.dumps(_resolved(field, DESCRIPTION), sort_keys=True)}"


DESCRIPTION = _description()
ROUTES = dict(_bodies(DESCRIPTION))
# The route on which a kind of field is tried; the fields of ``GOOD`` and tools are tried on each, which does more to
# them than to read them.
TRIED_ON: dict[str, str] = {}
for _path, _schema in ROUTES.items():
    for _name, _field in _schema.get("properties", {}).items():
        TRIED_ON.setdefault(_kind(_name, _field), _path)


@pytest.fixture(autouse=True)
def as_in_the_server() -> Iterator[None]:
    """Threads hand on Python's lock as they do in the HTTP process."""
    before_s = sys.getswitchinterval()
    share_interpreter()
    yield
    sys.setswitchinterval(before_s)


class Ticks:
    """The longest silence of an event loop: what this process worked meanwhile, or less if that was longer than it."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self.longest_s = 0.0
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        worked_s, now_s = time.process_time(), time.monotonic()
        while True:
            await asyncio.sleep(0)
            then_s, before_s = worked_s, now_s
            worked_s, now_s = time.process_time(), time.monotonic()
            self.longest_s = max(self.longest_s, min(worked_s - then_s, now_s - before_s))


def _values(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies of a route, each with one large field, with the field's name."""
    properties: dict[str, Any] = ROUTES[path].get("properties", {})
    needed = [*ROUTES[path].get("required", ()), *(GOOD.keys() & {"messages", "prompt", "max_tokens"})]
    good = {name: GOOD.get(name, _small(properties[name], DESCRIPTION)) for name in needed if name in properties}
    for name, field in properties.items():
        if path != TRIED_ON[_kind(name, field)] and name not in (*GOOD, "tools", "system"):
            continue
        for value in _large(field, DESCRIPTION):
            yield name, {**good, name: value}
    if "tools" in properties:
        for schema in _large({"type": "object"}, DESCRIPTION):
            function = {"name": "f", "parameters": schema, "strict": True, "input_schema": schema}
            choice = {"type": "function", "name": "f", "function": {"name": "f"}}
            tool = {"type": "function", **function, "function": function}
            yield "tools", {**good, "tools": [tool], "tool_choice": choice}


@pytest.mark.parametrize("path", ROUTES)
def test_no_field_silences_the_loop(path: str) -> None:
    """Oracle: the bound, while some streams run; the answers do not matter."""
    slow: list[tuple[str, float]] = []

    async def scenario(app: App) -> None:
        running = {"prompt": "a", "max_tokens": 900, "stream": True}
        streams = [app.start("POST", "/v1/completions", running) for _ in range(24)]
        await until(lambda: all(stream.parts for stream in streams), "the streams")
        ticks = Ticks()
        for name, body in _values(path):
            data = json.dumps(body).encode()
            async with ticks.watched():
                exchange = app.start("POST", path, data)
                with contextlib.suppress(TimeoutError):  # of a route that pauses the engine
                    await asyncio.wait_for(exchange.reply(), PATIENCE_S)
                exchange.leave()
                await exchange.ended()
            if ticks.longest_s > MOST_S:
                slow.append((name, round(ticks.longest_s, 2)))
        for stream in streams:
            stream.leave()
            await stream.ended()
        await until(lambda: app.state.llm.num_unfinished == 0, "the streams' end")

    run_served(scenario, FakeEngine(reply=lambda request: [7] * 900, step_delay_s=0.1), byte_level_tokenizer())
    assert not slow, f"{path}: fields, and the seconds for which the event loop stood still: {slow}"


def _without_json() -> Iterator[tuple[str, str]]:
    """The routes that take no JSON."""
    for path, methods in sorted(DESCRIPTION["paths"].items()):
        for method, operation in methods.items():
            if "requestBody" not in operation:
                yield method.upper(), path


def _form(*parts: bytes) -> bytes:
    return b"".join(b"--cut\r\n" + part + b"\r\n" for part in parts) + b"--cut--\r\n"


def test_no_route_without_json_silences_the_loop(tmp_path: Path) -> None:
    """Oracle: the bound, for long paths, queries and headers (as HTTP's parser lets them in), and for bodies; beside
    300 stored files."""
    long, slow = "a" * 60_000, []
    query = "&".join(f"k{number}=v" for number in range(6000))
    head = b'Content-Disposition: form-data; name="file"; filename="'
    forms = [
        _form(head + b'f"\r\n\r\n' + b"\r\n--cu" * SIZE),
        _form(head + b"f" * SIZE + b'"\r\n\r\nx'),
        _form(*[b'Content-Disposition: form-data; name="n"\r\n\r\n'] * (SIZE // 32)),
        b"--cut\r\n" * (SIZE // 8),
        b"\r\n" * SIZE,
    ]

    async def ask(ticks: Ticks, app: App, method: str, path: str, body: bytes | None, **headers: str) -> None:
        async with ticks.watched():
            exchange = app.start(method, path, body, **headers)
            reply = await asyncio.wait_for(exchange.reply(), PATIENCE_S)
        assert reply.status != 500, (method, path[:40])
        if ticks.longest_s > MOST_S:
            slow.append((method, path[:40], round(ticks.longest_s, 2)))

    async def scenario(app: App) -> None:
        ticks = Ticks()
        for number in range(300):
            with store.incoming() as file:
                file.write(b"x")
                store.add_file(file, f"name{number}", "batch", None, None)
        app.app.state.batches = SimpleNamespace(store=store, cancel=None)
        for method, path in _without_json():
            await ask(ticks, app, method, path, None)
            await ask(ticks, app, method, f"{path.partition('{')[0]}{long if '{' in path else ''}?{query}", None)
            await ask(ticks, app, method, path, None, cookie=long, range=f"bytes={'0-1,' * 15_000}")
        for body in forms:
            await ask(ticks, app, "POST", "/v1/files", body, **{"content-type": "multipart/form-data; boundary=cut"})
        await ask(ticks, app, "POST", "/invocations", b'{"a":' * (SIZE // 8))

    with BatchStore(tmp_path, retention_s=9, max_bytes=1 << 30) as store:
        config = ServerConfig(batch_storage_dir=str(tmp_path))
        run_served(scenario, FakeEngine(reply=lambda request: [7]), byte_level_tokenizer(), config)
    assert not slow, f"routes, and the seconds for which the event loop stood still: {slow}"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 20},
        {"echo": True, "logprobs": 20},
        {"echo": True, "logprobs": 20, "stream": True},
        {"n": 64, "logprobs": 20, "max_tokens": 40},
        {"return_token_ids": True, "n": 64},
    ],
    ids=str,
)
def test_a_large_answer_does_not_silence_the_loop(fields: dict[str, Any]) -> None:
    """Oracle: the bound, for megabytes of log-probabilities, and that they are all there."""
    prompts = [[2, 3, 4, 5] * 250] * (1 if "n" in fields else 10)

    async def scenario(app: App) -> None:
        ticks = Ticks()
        async with ticks.watched():
            reply = await app.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, **fields})
        assert reply.status == 200 and len(reply.content) > 100_000
        if not fields.get("stream"):
            assert len(reply.json()["choices"]) == len(prompts) * fields.get("n", 1)
        assert ticks.longest_s < MOST_S

    run_served(scenario, FakeEngine(reply=lambda request: [7] * 900), byte_level_tokenizer())


def test_an_answer_of_too_many_logprobs_is_refused() -> None:
    """Oracle: prompts x n x tokens x (alternatives + 1) by hand, and the field."""
    body = {"prompt": [[2] * 1000] * 25, "n": 2, "max_tokens": 1}

    async def scenario(app: App) -> None:
        for name, fields in (
            ("prompt_logprobs", {"prompt_logprobs": 20}),
            ("logprobs", {"echo": True, "logprobs": 20}),
        ):
            reply = await app.post("/v1/completions", {**body, **fields})
            assert reply.status == 400 and reply.json()["error"]["param"] == name
            assert "1050000 log-probabilities of prompts; at most 1048576" in reply.json()["error"]["message"]

    run_served(scenario, FakeEngine(), byte_level_tokenizer())
