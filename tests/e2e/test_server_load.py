"""Many streams and slow readers; application, event loop and fake engine in this process.  No test measures time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from tests.e2e.frontend import new_engine
from tests.fake_engine import FakeEngine, fake_service
from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.output_streams import MAX_FOLDED_TOKENS, MAX_WAITING, Mailbox
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState
from tp_engine.server.turns import PER_TURN, REFUSED_PER_TURN, Turnstile

DEADLINE_S = 60.0
NUM_STREAMS = 300
Message = MutableMapping[str, Any]


class Client:
    """One connection to the application: a request, its answer, and a gate for the next part."""

    def __init__(self, app: FastAPI, method: str, path: str, body: object = None) -> None:
        self._app = app
        self._body = b"" if body is None else json.dumps(body).encode()
        self._scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "server": ("test", 80),
            "headers": [
                (b"content-length", str(len(self._body)).encode()), (b"content-type", b"application/json"),
            ],
            "client": ("127.0.0.1", 1),
        }  # fmt: skip
        self._asked = False
        self._gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []

    async def run(self) -> Client:
        await self._app(self._scope, self._receive, self._send)
        return self

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        if message["body"]:
            self.parts.append(message["body"])
        await self.reading.wait()

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    def events(self) -> list[Any]:
        lines = b"".join(self.parts).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events())


Scenario = Callable[[FastAPI, ServerState], Awaitable[None]]


def run(scenario: Scenario, engine: FakeEngine, **options: Any) -> None:
    """Run a scenario against the application and a served engine, within the deadline."""

    async def all_of_it(address: str) -> None:
        state = ServerState(ServerConfig(**options), ("demo",))
        app = create_app(state)
        llm = await AsyncLLM.connect(address, timeout_s=DEADLINE_S)
        state.attach(llm)
        try:
            await scenario(app, state)
            assert llm.num_unfinished == 0 and state.limit.num_prompts == 0
        finally:
            await state.close()

    with fake_service(engine) as service:
        asyncio.run(asyncio.wait_for(all_of_it(service.address), DEADLINE_S))


def stream_body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "stream": True, "temperature": 0, **more}


@pytest.mark.slow
def test_many_streams_at_once_are_all_whole() -> None:
    """Oracle: every stream repeats its own prompt; ``/health`` answers while they run, however many run."""

    async def scenario(app: FastAPI, state: ServerState) -> None:
        prompts = [f"stream {number} " + "ab" * (number % 7) for number in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(Client(app, "POST", "/v1/completions", stream_body(prompt, max_tokens=50)).run())
            for prompt in prompts
        ]
        num_healthy = 0
        while not all(stream.done() for stream in streams):
            num_healthy += (await Client(app, "GET", "/health").run()).status == 200
            await asyncio.sleep(0.002)
        answers = await asyncio.gather(*streams)
        assert num_healthy >= 3
        assert [answer.text() for answer in answers] == prompts

    engine = new_engine(step_delay_s=0.001)
    engine.max_running = NUM_STREAMS
    run(scenario, engine)


def test_the_queue_is_bounded_whatever_its_callers_do() -> None:
    """Oracle: 64 requests run and 5 are queued; exactly the others get 429 with Retry-After, and none of those runs."""

    async def scenario(app: FastAPI, state: ServerState) -> None:
        body = stream_body("x", max_tokens=100_000, ignore_eos=True)
        inside = [Client(app, "POST", "/v1/completions", body) for _ in range(69)]
        tasks = [asyncio.create_task(client.run()) for client in inside]
        while state.limit.num_prompts < 69:
            await asyncio.sleep(0.001)
        for extra in (stream_body("y"), {"prompt": "y"}, {"prompt": ["y", "y"]}):
            refused = await Client(app, "POST", "/v1/completions", extra).run()
            assert refused.status == 429 and int(refused.headers[b"retry-after"]) >= 1
            assert json.loads(b"".join(refused.parts))["error"]["code"] == "queue_full"
        for client in inside:
            client.leave()
        await asyncio.gather(*tasks)
        while (await state.llm.engine.report()).stats.num_running:
            await asyncio.sleep(0.001)
        assert (await Client(app, "POST", "/v1/completions", {"prompt": "y"}).run()).status == 200

    engine = new_engine(step_delay_s=0.001)
    engine.model_info = msgspec.structs.replace(engine.model_info, max_model_len=1 << 20)
    run(scenario, engine, max_num_queued_reqs=5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_reader_that_stops_reading_holds_a_bounded_number_of_updates(n: int) -> None:
    """Oracle: while the client does not read, the mailbox holds 64 updates and one per 256 tokens of each sequence.
    When the client reads on, the stream is whole, in far fewer writes than tokens."""
    num_tokens = 4000

    async def scenario(app: FastAPI, state: ServerState) -> None:
        body = stream_body("z", max_tokens=num_tokens, ignore_eos=True, n=n)
        client = Client(app, "POST", "/v1/completions", body)
        client.reading.clear()
        task = asyncio.create_task(client.run())
        largest, streams = 0, state.llm.outputs
        while not client.parts or (await state.llm.engine.report()).stats.num_running:
            largest = max([largest, *(len(one) for one in streams._mailboxes.values() if isinstance(one, Mailbox))])
            await asyncio.sleep(0.001)
        assert largest <= MAX_WAITING + n * (num_tokens // MAX_FOLDED_TOKENS + 2)
        client.reading.set()
        await task
        choices = [event["choices"][0] for event in client.events()]
        for index in range(n):
            assert "".join(choice["text"] for choice in choices if choice["index"] == index) == "z" * num_tokens
        assert len(client.parts) < num_tokens / 10

    engine = new_engine()
    engine.model_info = msgspec.structs.replace(engine.model_info, max_model_len=1 << 20)
    run(scenario, engine)


def test_a_burst_begins_a_few_at_a_time() -> None:
    """Oracle: the number of POSTs that begin between two turns of the loop, in order of arrival."""
    begun: list[int] = []
    seen_by_looks: list[int] = []

    async def scenario() -> None:
        turnstile = Turnstile(lambda: False)

        async def ask(number: int) -> None:
            await turnstile.wait()
            begun.append(number)

        burst = [asyncio.create_task(ask(number)) for number in range(50)]
        await asyncio.sleep(0)
        sizes = [len(begun)]
        while len(begun) < 50:
            seen_by_looks.append(len(begun))
            await asyncio.sleep(0)
            sizes.append(len(begun))
        await asyncio.gather(*burst)
        assert begun == list(range(50))
        assert max(after - before for before, after in zip([0, *sizes], sizes, strict=False)) <= 2 * PER_TURN
        assert len(set(seen_by_looks)) >= 5
        await asyncio.wait_for(ask(50), DEADLINE_S)

    asyncio.run(scenario())


def test_a_full_server_refuses_a_burst_at_once() -> None:
    """Oracle: the number of turns of the loop: as soon as it is full, many pass in each."""
    begun: list[int] = []

    async def scenario() -> None:
        turnstile = Turnstile(lambda: len(begun) >= 20)

        async def ask(number: int) -> None:
            await turnstile.wait()
            begun.append(number)

        burst = [asyncio.create_task(ask(number)) for number in range(1000)]
        num_turns = 0
        while len(begun) < 1000:
            await asyncio.sleep(0)
            num_turns += 1
        await asyncio.gather(*burst)
        assert begun == list(range(1000))
        assert num_turns < 20 / PER_TURN + 2 * 1000 / REFUSED_PER_TURN + 10

    asyncio.run(scenario())
