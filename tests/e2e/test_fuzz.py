"""Thousands of nearly right bodies through the server to a real engine: nothing breaks, no block stays in use."""

from __future__ import annotations

import asyncio
import collections
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.asgi import App, Reply, run_served
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tests.wild_bodies import GOOD, wild_body
from tp_engine.engine.engine import Engine
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

NUM_BODIES = int(2000 * float(os.environ.get("TP_ENGINE_TEST_SCALE", "1")))
NUM_AT_ONCE = 12
SEED = int(os.environ.get("TP_ENGINE_TEST_SEED", "2026"))
CONFIG = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
REFUSALS = {400, 404, 413}
GOOD_BODY = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}


def complaint(reply: Reply) -> str | None:
    """The fault of an answer; None for a whole answer or a refusal in the OpenAI shape."""
    kind = reply.headers["content-type"]
    if "event-stream" in kind:
        broken = any("error" in one or one.get("type") == "response.failed" for one in reply.events)
        return "a stream that failed" if broken or not reply.events else None
    if not kind.startswith("application/json"):
        return f"content type {kind}"
    if reply.status == 200:
        return None
    error = reply.json()["error"]
    if reply.status not in REFUSALS or error.keys() != {"message", "type", "param", "code"} or not error["message"]:
        return f"status {reply.status}"
    return None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("tiny") / "model") as made:
        yield made


def test_no_body_breaks_the_server_or_keeps_a_block(engine: Engine) -> None:
    """Oracle: answers are 200 or a refusal in the OpenAI shape; afterwards no block is in use, and a good request gets
    the same answer as before."""
    rng = random.Random(SEED)
    statuses: collections.Counter[int] = collections.Counter()
    bodies = [wild_body(rng) for _ in range(NUM_BODIES)]

    async def client(app: App) -> None:
        while bodies:
            path, raw = bodies.pop()
            exchange = app.start("POST", path, raw)
            try:
                reply = await exchange.reply()
            except TimeoutError:
                bodies.clear()
                raise AssertionError(f"no answer: {path} {raw[:3000]!r} got {exchange.parts!r}") from None
            if (trouble := complaint(reply)) is not None:
                bodies.clear()
                raise AssertionError(f"{trouble}: {path} {raw[:3000]!r} gave {reply.content[:1000]!r}")
            statuses[reply.status] += 1

    async def scenario(app: App) -> None:
        before = await good_text(app)
        await asyncio.gather(*(client(app) for _ in range(NUM_AT_ONCE)))
        assert await good_text(app) == before

    run_served(scenario, engine, chat_tokenizer(), CONFIG, timeout_s=100.0 + NUM_BODIES / 20)
    assert_nothing_in_use(engine)
    assert min(statuses[200], statuses[400]) > NUM_BODIES // 10, statuses


async def good_text(app: App) -> Any:
    reply = await app.post("/v1/completions", GOOD_BODY)
    assert reply.status == 200, reply.content
    return reply.json()["choices"][0]["text"]


def test_the_bodies_that_are_mutated_are_good(engine: Engine) -> None:
    """Oracle: status 200; if all bodies were refused, the fuzzer would test little."""

    async def scenario(app: App) -> None:
        for path, body in GOOD:
            reply = await app.post(path, body)
            assert reply.status == 200, (path, body, reply.content)

    run_served(scenario, engine, chat_tokenizer(), CONFIG)
    assert_nothing_in_use(engine)
