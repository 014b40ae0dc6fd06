"""Clients that leave in any phase of a request, and clients that do not read: a real engine gets its blocks back.

The engine computes 16 prompt tokens a step for at most two sequences, and each step waits for the test.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.asgi import App, Exchange, run_served, until
from tests.fake_engine import FakeEngine
from tests.gated_engine import GatedEngine
from tests.tiers import fast_first
from tests.tiny_server import assert_nothing_in_use, chat_tokenizer, tiny_engine
from tp_engine.requests.request import EngineRequest

PROMPT = [5 + i % 40 for i in range(40)]  # three steps of prefill
NUM_TOKENS = 6
LAST_STEP = 7  # one more step ends a completion; it runs when the client leaves
# Steps after which the client leaves, if the request is alone; None: two other requests are ahead of it.
PHASES = {
    "queued": None,
    "before the first step": 0,
    "prefill": 1,
    "first token": 3,
    "decode": 5,
    "last step": LAST_STEP,
}
GENERATION = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": PROMPT} | GENERATION),
    "completions": ("/v1/completions", {"prompt": PROMPT, "n": 2} | GENERATION),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 32}]} | GENERATION),
    "response": ("/v1/responses", {"input": "x" * 32} | GENERATION),
}
OTHERS = {"prompt": [[7] * 3, [8] * 3], "max_tokens": 80, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    with tiny_engine(folder, max_num_batched_tokens=16, max_num_seqs=2) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BODIES)
def test_a_client_that_leaves_gives_its_blocks_back(engine: Any, name: str, stream: bool) -> None:
    """Oracle: in every phase the engine aborts the request; then no block is in use, and the blocks add up."""
    path, body = BODIES[name]
    gate = GatedEngine(engine)

    async def scenario(app: App) -> None:
        for num_steps in PHASES.values():
            fresh = {"stream": stream, "cache_salt": f"{name} {stream} {num_steps}"}  # misses the prefix cache
            await leave_after(app, gate, path, body | fresh, num_steps)
            assert_nothing_in_use(engine)
        reply = await app.post(path, body)
        assert reply.status == 200, reply.content

    run_served(scenario, gate, chat_tokenizer())
    assert_nothing_in_use(engine)


async def leave_after(app: App, gate: GatedEngine, path: str, body: dict[str, Any], num_steps: int | None) -> None:
    """Send a request, leave after ``num_steps`` engine steps, and let the engine go on."""
    gate.close_gate()
    exchanges = []
    if num_steps is None:
        exchanges.append(await arrived(app, gate, "/v1/completions", OTHERS, num_requests=2))
        await steps_done(gate, 1)
    exchanges.append(await arrived(app, gate, path, body))
    request_id, num_aborted = gate.added[-1], len(gate.aborted)
    await steps_done(gate, num_steps or 0)
    await asyncio.sleep(0.01)  # the engine's output reaches the streams
    for exchange in exchanges:
        exchange.leave()
    for exchange in exchanges:
        await exchange.ended()
    if num_steps != LAST_STEP:
        await until(lambda: request_id in gate.aborted[num_aborted:], "the request to be aborted")
    gate.open()
    await until(lambda: not gate.has_unfinished, "the engine to be idle")


async def arrived(app: App, gate: GatedEngine, path: str, body: dict[str, Any], num_requests: int = 1) -> Exchange:
    """Send requests and wait until the engine has them."""
    num_added = len(gate.added)
    exchange = app.start("POST", path, body)
    await until(lambda: len(gate.added) == num_added + num_requests, "the request to arrive")
    return exchange


async def steps_done(gate: GatedEngine, num_steps: int) -> None:
    """Let ``num_steps`` through and wait for them."""
    wanted = gate.num_steps + num_steps
    gate.allow(num_steps)
    await until(lambda: gate.num_steps >= wanted, "the steps")


@pytest.mark.parametrize("path", fast_first(1, ["/v1/completions", "/v1/responses"]))
def test_clients_that_do_not_read_are_bounded_and_hold_up_nobody(path: str) -> None:
    """Oracle: 16 clients with 900 tokens each do not read: the engine goes on, other clients are served, and the memory
    for each stays small; in the end each gets its whole text, in fewer pieces."""
    engine = FakeEngine(endless)
    body: dict[str, Any] = {"stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"input": "x", "max_output_tokens": 900} if path == "/v1/responses" else {"prompt": "x", "max_tokens": 900}

    async def scenario(app: App) -> None:
        whole = text_of((await app.post(path, body)).events)
        exchanges = [app.start("POST", path, body) for _ in range(16)]
        gc.collect()
        tracemalloc.start()
        for exchange in exchanges:
            exchange.may_read.clear()
        await until(lambda: len(engine.added) == 17 and not engine.has_unfinished, "the engine to have answered all")
        assert (await app.post("/v1/completions", {"prompt": "y", "max_tokens": 3})).status == 200
        gc.collect()
        per_client = tracemalloc.get_traced_memory()[0] / len(exchanges)
        tracemalloc.stop()
        assert per_client < 160_000, per_client  # about 75,000; an object per token would be 500,000
        for exchange in exchanges:
            exchange.may_read.set()
        for exchange in exchanges:
            assert text_of((await exchange.reply()).events) == whole
            assert len(exchange.parts) < 450

    run_served(scenario, engine, chat_tokenizer())


def endless(request: EngineRequest) -> list[int]:
    """The tokens of an answer of letters."""
    return [5 + i % 40 for i in range(request.params.max_tokens or 0)]


def text_of(events: list[Any]) -> str:
    """The text of a stream of either endpoint."""
    if "choices" in events[0]:
        return "".join(choice["text"] for one in events for choice in one["choices"])
    return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
