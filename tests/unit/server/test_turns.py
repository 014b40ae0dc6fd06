"""Whose request begins next, and who still gets in while the server is full."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.asgi import App, Exchange, until
from tests.patience import on_this_machine
from tests.unit.server.test_server_api import error_of, serve
from tp_engine.api.preparing import LARGE
from tp_engine.server import access
from tp_engine.server.access import Caller
from tp_engine.server.config import ServerConfig
from tp_engine.server.turns import PER_TURN, SharedAnswer, Turnstile

SHORT = {"prompt": "a", "max_tokens": 1}


class Half(Exchange):
    """A client that sends half of its body, and the rest when ``may_send`` is set."""

    def __post_init__(self) -> None:
        self.may_send = asyncio.Event()
        self.received = 0
        super().__post_init__()

    async def _receive(self) -> dict[str, Any]:
        self.received += 1
        half = len(self.body) // 2
        if self.received == 1:
            return {"type": "http.request", "body": self.body[:half], "more_body": True}
        if self.received == 2:
            await self.may_send.wait()
            return {"type": "http.request", "body": self.body[half:], "more_body": False}
        return await super()._receive() if self._body_taken else await self._end()

    async def _end(self) -> dict[str, Any]:
        self._body_taken = True
        return await super()._receive()


def test_half_a_body_holds_no_place_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no turn is asked for before the body is whole; the rest of it is then read as it was sent."""
    asked: list[str] = []
    wait = Turnstile.wait

    async def noted(self: Turnstile, client: str = "") -> None:
        asked.append(client)
        await wait(self, client)

    monkeypatch.setattr(Turnstile, "wait", noted)

    async def scenario(app: App) -> None:
        halves = [Half(app.app, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}') for _ in range(20)]
        await until(lambda: all(half.received == 2 for half in halves), "the halves")
        assert asked == []
        assert (await app.post("/v1/completions", SHORT)).status == 200
        assert asked == ["127.0.0.1"]
        for half in halves[:10]:
            half.may_send.set()
            assert (await half.reply()).status == 200
        for half in halves[10:]:
            half._task.cancel()
        await asyncio.gather(*(half._task for half in halves[10:]), return_exceptions=True)
        assert len(asked) == 11

    serve(scenario)


def test_half_a_body_that_does_not_go_on_is_refused() -> None:
    """Oracle: 408, after the time that a body has."""

    async def scenario(app: App) -> None:
        half = Half(app.app, "POST", "/v1/messages", b'{"prompt": "a", "max_tokens": 1}')
        reply = await half.reply()
        assert reply.status == 408 and "did not arrive within 0.05 s" in reply.json()["error"]["message"]
        assert reply.headers["connection"] == "close"

    serve(scenario, config=ServerConfig(body_timeout_s=0.05))


def test_each_client_begins_in_its_turn() -> None:
    """Oracle: by hand: behind the first two, one of each client, and of each in order of arrival."""
    begun: list[str] = []

    async def scenario() -> None:
        turnstile = Turnstile(lambda: False)

        async def ask(client: str, number: int) -> None:
            await turnstile.wait(client)
            begun.append(f"{client}{number}")

        tasks = [asyncio.create_task(ask("a", number)) for number in range(100)]
        tasks += [asyncio.create_task(ask(client, number)) for client in "bc" for number in range(2)]
        async with asyncio.timeout(on_this_machine(10)):
            await asyncio.gather(*tasks)

    asyncio.run(scenario())
    assert begun[:9] == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "c1", "a4"]
    assert begun[9:] == [f"a{number}" for number in range(5, 100)]


def test_large_bodies_do_not_keep_small_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a small one that comes behind 300 large ones begins in the first turns, and is answered."""
    begun: list[int] = []
    wait = Turnstile.wait

    async def noted(self: Turnstile, client: str = "") -> None:
        await wait(self, client)
        begun.append(self._per_turn)

    monkeypatch.setattr(Turnstile, "wait", noted)

    async def scenario(app: App) -> None:
        body = b'{"prompt": "a", "max_tokens": 1, "user": "' + b"u" * LARGE + b'"}'
        large = [Half(app.app, "POST", "/v1/completions", body) for _ in range(300)]
        await asyncio.sleep(0)
        assert (await app.post("/v1/completions", SHORT)).status == 200
        assert begun.index(PER_TURN) < 20
        for half in large:
            half._task.cancel()
        await asyncio.gather(*(half._task for half in large), return_exceptions=True)

    serve(scenario)


def test_who_fills_the_server_does_not_shut_out_others() -> None:
    """Oracle: by hand: of 64 + 0 places an eighth more is spare, a quarter of that for each other client."""

    async def scenario(app: App) -> None:
        limit = app.state.limit
        limit.max_num_prompts = 64
        with ExitStack() as held:
            access._CALLER.set(Caller(place="10.0.0.1"))
            held.enter_context(limit.hold(64))
            refused = await app.start("POST", "/v1/completions", {**SHORT, "prompt": ["a"] * 3}).reply()
            assert refused.status == 429 and error_of(refused)["code"] == "queue_full"
            assert (await app.post("/v1/completions", {**SHORT, "prompt": ["a"] * 2})).status == 200
            for place in ("10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"):
                access._CALLER.set(Caller(place=place))
                held.enter_context(limit.hold(2))
            assert (await app.post("/v1/completions", SHORT)).status == 429
        assert limit.num_prompts == 0 and not limit._num_of

    serve(scenario)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_client_is_an_address_or_a_network_or_a_key(address: str, place: str) -> None:
    """Oracle: RFC 4291: the last 64 bits of an address are the host's own."""
    assert access._place({"client": (address, 1)}) == place
    caller = Caller(place=place)
    assert caller.client == place and replace(caller, owner=b"\x01").client == "01"
    assert access._place({"client": None}) == ""


def test_those_who_ask_meanwhile_share_an_answer() -> None:
    """By hand: the first asks alone, ten others while that is made share the next, which begins after them; one that
    leaves, or an error, is not the others'."""
    begun: list[int] = []

    async def make() -> int:
        number = len(begun)
        begun.append(number)
        await asyncio.sleep(0.01)
        if number == 2:
            raise ValueError("the third")
        return number

    async def run() -> None:
        shared = SharedAnswer(make, 0.0)
        first = asyncio.ensure_future(shared.get())
        while not begun:
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(shared.get()) for _ in range(10)]
        await asyncio.sleep(0)
        others.pop().cancel()
        assert await first == 0
        assert await asyncio.gather(*others) == [1] * 9
        with pytest.raises(ValueError, match="the third"):
            await shared.get()
        assert await shared.get() == 3

    asyncio.run(run())


def test_a_shared_answer_is_made_now_and_then() -> None:
    """By hand: questions one behind the other begin an answer each, an interval apart, and none is older."""
    begun: list[float] = []

    async def make() -> float:
        begun.append(asyncio.get_running_loop().time())
        return begun[-1]

    async def run() -> None:
        shared = SharedAnswer(make, 0.05)
        for _ in range(3):
            asked = asyncio.get_running_loop().time()
            assert await shared.get() >= asked

    asyncio.run(run())
    assert begun[1] - begun[0] >= 0.049 and begun[2] - begun[1] >= 0.049
