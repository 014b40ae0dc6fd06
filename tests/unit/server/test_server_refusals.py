"""What the server refuses, and how: before the first byte, in one shape; and what happens on a later failure."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.asgi import App, Exchange, run_served, until
from tests.fake_engine import FakeEngine, arith, echo
from tests.tiny_server import chat_tokenizer, tiny_engine
from tests.unit.server.test_server_api import error_of, serve
from tp_engine.requests.request import EngineRequest
from tp_engine.server.config import ServerConfig


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 5000}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": -1}, "temperature"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
    ],
    ids=str,
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    """Oracle: the wrong field, before the first byte, also for a stream."""

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/completions", {"prompt": "a", **body})
        assert reply.status == 400 and error_of(reply)["param"] == param

    serve(scenario)


class FailingLater(FakeEngine):
    """Fails at the fifth step."""

    def step(self) -> Any:
        if self.num_steps == 4:
            raise RuntimeError("rank 1: lost")
        return super().step()


def test_a_failure_within_a_stream_is_an_event() -> None:
    """Oracle: 200 has been sent; an error event in the one shape and the end follow."""

    async def scenario(app: App) -> None:
        body = {"prompt": [5], "max_tokens": 100, "stream": True, "ignore_eos": True}
        reply = await app.post("/v1/completions", body)
        assert reply.status == 200 and reply.content.endswith(b"data: [DONE]\n\n")
        assert reply.events[-1]["error"]["code"] == "engine_dead"
        assert (await app.get("/health")).status == 503

    serve(scenario, FailingLater(arith))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_refusals_that_would_come_again_say_so(path: str) -> None:
    """Oracle: the header that the libraries of OpenAI and Anthropic read before they look at the status."""
    body = {"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 3}

    async def scenario(app: App) -> None:
        key = {"authorization": "Bearer key"}
        wrong = [
            await app.post(path, body),
            await app.post(path, body | {"model": "other"}, **key),
            await app.post(path, {"temperature": "x"}, **key),
        ]
        assert [reply.status for reply in wrong] == [401, 404, 400]
        assert [reply.headers.get("x-should-retry") for reply in wrong] == ["false"] * 3

    serve(scenario, config=ServerConfig(api_key=("key",)))


def test_what_says_to_be_no_json_is_refused() -> None:
    """Oracle: a page of another origin can send text/plain without a preflight request; such a body has no effect."""

    async def scenario(app: App) -> None:
        body = json.dumps({"prompt": "a"}).encode()
        for kind, status in (
            ("text/plain", 400),
            ("application/x-www-form-urlencoded", 400),
            ("application/json; charset=utf-8", 200),
            ("Application/JSON", 200),
        ):
            reply = await app.post("/v1/completions", body, **{"Content-Type": kind})
            assert reply.status == status, kind

    assert len(serve(scenario).added) == 2


class Trickle(Exchange):
    """A client that never sends the rest of its body."""

    async def _receive(self) -> dict[str, Any]:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self.body, "more_body": True}
        await self._gone.wait()
        return {"type": "http.disconnect"}


def test_a_body_that_does_not_come_is_408() -> None:
    """Oracle: the limit of the configuration; the connection is closed."""

    async def scenario(app: App) -> None:
        exchange = Trickle(app.app, "POST", "/v1/completions", b'{"prompt"')
        reply = await exchange.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert error_of(reply)["code"] == "request_timeout"

    serve(scenario, config=ServerConfig(body_timeout_s=0.05))


def test_a_full_house_is_429_and_says_when_to_come_back() -> None:
    """Oracle: as many prompts as may run or wait are inside; the next is refused, and served later."""

    async def scenario(app: App) -> None:
        app.state.limit.max_num_prompts = 2
        body = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True}
        inside = [app.start("POST", "/v1/completions", body) for _ in range(2)]
        await until(lambda: app.state.limit.num_prompts == 2, "both")
        reply = await app.post("/v1/completions", {"prompt": "a"})
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
        assert "x-should-retry" not in reply.headers
        assert error_of(reply)["type"] == "rate_limit_error"
        unread = await Trickle(app.app, "POST", "/v1/chat/completions", b"{").reply()
        assert unread.status == 429  # without waiting for the rest of the body
        for exchange in inside:
            exchange.leave()
            await exchange.ended()
        assert (await app.post("/v1/completions", {"prompt": "a"})).status == 200

    def reply(request: EngineRequest) -> list[int]:
        return arith(request) if request.params.ignore_eos else echo(request)

    serve(scenario, FakeEngine(reply, step_delay_s=0.005))


def test_few_blocks_shorten_the_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: three blocks of eight tokens, and an answer's last token, which is never computed: 25 in all.

    What the server says of itself, what it refuses and what it serves have one number.
    """
    monkeypatch.setattr(logging.getLogger("tp_engine"), "propagate", True)
    with tiny_engine(tmp_path / "model", num_gpu_blocks_override=3) as engine:

        async def scenario(app: App) -> None:
            card = (await app.get("/v1/models/demo")).json()
            assert card["max_model_len"] == engine.model_info.max_model_len == 25
            body: dict[str, Any] = {"prompt": [5] * 20, "ignore_eos": True, "temperature": 0}
            for most in (5, 25):
                served = (await app.post("/v1/completions", body | {"max_tokens": most})).json()
                assert served["usage"]["completion_tokens"] == 5
                assert served["choices"][0]["finish_reason"] == "length"
            for wrong in ({"max_tokens": 26}, {"prompt": [5] * 25, "max_tokens": 1}):
                error = error_of(await app.post("/v1/completions", body | wrong))
                assert error["code"] == "context_length_exceeded" and "25 tokens" in error["message"]

        run_served(scenario, engine, chat_tokenizer())
    (line,) = [text for text in caplog.messages if "num_gpu_blocks_override" in text]
    assert "holds 24 tokens, so max_model_len is 25 instead of 96" in line
