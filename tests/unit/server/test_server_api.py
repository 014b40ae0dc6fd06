"""Endpoints, request fields and errors of the server, in this process, in front of an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.asgi import App, Exchange, Reply, run_served, until
from tests.fake_engine import FakeEngine, arith, echo
from tests.tiny_server import chat_tokenizer
from tp_engine import __version__
from tp_engine.ipc.pulse import Pulse
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

CONTEXT = 1024  # of the fake engine
MESSAGES = [{"role": "user", "content": "hi there"}]


def serve(
    scenario: Callable[[App], Awaitable[None]], engine: FakeEngine | None = None, config: ServerConfig | None = None
) -> FakeEngine:
    """Run ``scenario`` against the server; returns the engine, whose ``added`` are the requests that reached it."""
    engine = engine or FakeEngine(echo)
    run_served(scenario, engine, chat_tokenizer(), config)
    return engine


def ids(text: str) -> list[int]:
    token_ids: list[int] = chat_tokenizer().encode(text)
    return token_ids


def error_of(reply: Reply) -> dict[str, Any]:
    body = reply.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def test_tokens_there_and_back() -> None:
    """Oracle: the tokenizer itself; a chat's prompt is the one that a chat request brings to the engine."""

    async def scenario(app: App) -> None:
        answer = (await app.post("/tokenize", {"prompt": "hello 世界", "return_token_strs": True})).json()
        assert answer["tokens"] == ids("hello 世界") and answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == CONTEXT
        assert answer["token_strs"] == chat_tokenizer().convert_ids_to_tokens(answer["tokens"])
        assert (await app.post("/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": "hello 世界"}
        assert (await app.post("/tokenize", {"prompt": ""})).json()["tokens"] == ids("")
        chat = (await app.post("/tokenize", {"messages": MESSAGES})).json()
        await app.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
        assert isinstance(app.service.engine, FakeEngine)
        assert chat["tokens"] == app.service.engine.added[-1].prompt_token_ids
        without = (await app.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})).json()
        assert len(without["tokens"]) < len(chat["tokens"])
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}),
            ("/detokenize", {"tokens": [5, 1000]}),
            ("/detokenize", {"tokens": "abc"}),
        ):
            assert (await app.post(path, body)).status == 400, (path, body)
        assert error_of(await app.post("/tokenize", {"prompt": "a", "model": "other"}))["code"] == "model_not_found"

    serve(scenario)


def test_health_says_what_the_start_is_doing() -> None:
    """Oracle: what rank 0 has said last, cut to a few hundred characters; nothing before it has said something."""

    async def scenario() -> None:
        state = ServerState(ServerConfig(), ("demo",))
        app, state.pulse = create_app(state), Pulse.create()

        async def ask() -> str:
            return str(error_of(await Exchange(app, "GET", "/health", b"").reply())["message"])

        assert await ask() == "the model is still loading"
        state.pulse.say("loading weights")
        state.pulse.say("compiling the CPU kernels: 3 of 17 files")
        assert await ask() == "the model is still loading (compiling the CPU kernels: 3 of 17 files)"
        state.pulse.say("x" * 5000)
        assert len(await ask()) < 500
        state.pulse.stop_sharing()

    asyncio.run(scenario())


def test_nothing_but_live_is_green_while_the_model_loads() -> None:
    """Oracle: a client that waits for ``/health``, or for a listed model, is served from then on."""

    async def scenario(key: str | None) -> None:
        app = create_app(ServerState(ServerConfig(api_key=() if key is None else (key,)), ("demo",)))

        async def ask(method: str, path: str) -> Reply:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return await Exchange(app, method, path, b"", headers).reply()

        assert (await Exchange(app, "GET", "/live", b"").reply()).json() == {"status": "live"}
        for method, path in (
            ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/ready"),
            ("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("GET", "/v1/models/other"),
        ):  # fmt: skip
            reply = await ask(method, path)
            assert (reply.status, error_of(reply)["code"]) == (503, "not_ready"), path
            assert int(reply.headers["retry-after"]) > 0 and "loading" in error_of(reply)["message"]
        for path in ("/health", "/ping"):
            assert (await Exchange(app, "GET", path, b"").reply()).status == 503, "open without a key too"
        if key is not None:
            assert (await Exchange(app, "GET", "/v1/models", b"").reply()).status == 401

    for key in (None, "sesame"):
        asyncio.run(asyncio.wait_for(scenario(key), 20))


def test_status_endpoints() -> None:
    """Oracle: the version of the package; the load counts prompts inside."""

    async def scenario(app: App) -> None:
        assert (await app.get("/version")).json() == {"version": __version__}
        assert (await app.start("POST", "/ping").reply()).status == (await app.get("/ping")).status == 200
        assert (await app.get("/live")).status == (await app.get("/health")).status == 200
        cards = (await app.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["demo", "alias"] and cards[0]["max_model_len"] == CONTEXT
        assert (await app.get("/v1/models/alias")).json() == cards[1]
        assert (await app.get("/load")).json()["server_load"] == 0
        running = app.start("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 900, "ignore_eos": True})
        await until(lambda: app.state.limit.num_prompts == 2, "both prompts")
        assert (await app.get("/load")).json()["server_load"] == 2
        running.leave()
        await running.ended()
        head = await app.start("HEAD", "/v1/models").reply()
        assert (head.status, head.content) == (200, b"") and head.headers["content-type"] == "application/json"
        options = await app.start("OPTIONS", "/v1/completions").reply()
        assert options.status == 204 and options.headers["allow"] == "POST"

    serve(scenario, FakeEngine(arith, step_delay_s=0.01))


def test_abort_by_any_id() -> None:
    """Oracle: the named request ends with ``abort`` and its tokens so far; the others continue until all are named."""

    async def scenario(app: App) -> None:
        body = {"prompt": ids("a"), "max_tokens": 1000, "ignore_eos": True}
        named = app.start("POST", "/v1/completions", {**body, "request_id": "one"})
        headed = app.start("POST", "/v1/completions", body, **{"X-Request-Id": "two-2"})
        stream = app.start("POST", "/v1/completions", {**body, "stream": True, "n": 2})
        await until(lambda: len(app.state.running.all()) == 3 and len(stream.parts) > 3, "all to run")
        for name, exchange in (("cmpl-one", named), ("two-2", headed)):
            assert (await app.post("/abort", {"request_ids": [name, "nobody"]})).json() == {"num_aborted": 1}
            answer = (await exchange.reply()).json()
            assert answer["id"] == f"cmpl-{name.removeprefix('cmpl-')}"
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort"]
        assert (await app.post("/abort", {"abort_all": True})).json() == {"num_aborted": 1}
        reasons = [choice["finish_reason"] for one in (await stream.reply()).events for choice in one["choices"]]
        assert [reason for reason in reasons if reason] == ["abort", "abort"]
        for wrong in ({}, {"request_ids": ["x"], "abort_all": True}, {"request_ids": "x"}):
            assert (await app.post("/abort", wrong)).status == 400

    serve(scenario, FakeEngine(arith, step_delay_s=0.005))


def test_weights_and_pauses() -> None:
    """Oracle: what reaches the engine, in both spellings; requests wait in a pause; the version is in later answers."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, FakeEngine)
        body = {"prompt": ids("a"), "max_tokens": 1000, "ignore_eos": True}
        update = {"model_path": "/weights/7", "weight_version": "step 7"}
        first = {"weight_version": "default", "kernel_choices": "own", "is_paused": False, "is_sleeping": False}
        assert (await app.get("/weight_info")).json() == first
        running = app.start("POST", "/v1/completions", {**body, "request_id": "one"})
        await until(lambda: engine.num_steps > 2, "a step")
        assert "pause the engine" in error_of(await app.post("/update_weights_from_disk", update))["message"]
        assert (await app.post("/pause?mode=keep&clear_cache=false", None)).json() == {"status": "paused"}
        assert (await app.get("/is_paused")).json() == {"is_paused": True}
        num_steps = engine.num_steps
        done = (await app.post("/update_weights_from_disk", {**update, "flush_cache": False})).json()
        assert done["success"] and done["weight_version"] == "step 7" and engine.orders == ["update_weights"]
        assert engine.is_paused and engine.num_steps == num_steps and app.state.limit.num_prompts == 1
        assert (await app.post("/resume", None)).json() == {"status": "resumed"}
        assert (await app.post("/abort_requests", {"request_ids": ["one"]})).json() == {"num_aborted": 1}
        assert (await running.reply()).json()["choices"][0]["finish_reason"] == "abort"
        short = {"prompt": ids("a"), "max_tokens": 3}
        assert (await app.post("/v1/completions", short)).json()["weight_version"] == "step 7"
        running = app.start("POST", "/v1/completions", body)
        await until(lambda: len(app.state.running.all()) == 1, "the request to run")
        for mode in ("sleep", "in_place"):
            assert error_of(await app.post("/pause_generation", {"mode": mode}))["param"] == "mode"
        assert error_of(await app.post("/pause?mode=sleep", None))["param"] == "mode"
        assert (await app.post("/pause_generation", {"mode": "abort"})).status == 200
        assert (await running.reply()).json()["choices"][0]["finish_reason"] == "abort"
        held = app.start("POST", "/v1/completions", short)
        await until(lambda: engine.has_requests, "the request to reach the engine")
        await asyncio.sleep(0.05)
        assert engine.is_paused and app.state.limit.num_prompts == 1 and not held.parts
        assert (await app.post("/continue_generation", None)).status == 200
        assert (await held.reply()).json()["usage"]["completion_tokens"] == 3
        assert (await app.post("/pause?mode=wait", None)).json() == {"status": "paused"}
        last = {"weight_version": "step 7", "kernel_choices": "own", "is_paused": True, "is_sleeping": False}
        assert (await app.get("/weight_info")).json() == last
        assert error_of(await app.post("/sleep?level=2", None))["message"].startswith("level is 2")
        assert (
            (await app.post("/sleep", None)).json() == {"is_sleeping": True} == (await app.get("/is_sleeping")).json()
        )
        assert "wake it up" in error_of(await app.post("/resume", None))["message"]
        assert (await app.post("/wake_up", None)).json() == {"is_sleeping": False}
        assert engine.orders[-2:] == ["sleep", "wake_up"] and not engine.is_paused

    serve(scenario, FakeEngine(arith, step_delay_s=0.005), ServerConfig(allowed_model_dirs=("/weights",)))


def test_sessions_that_return() -> None:
    """Oracle: what reaches the engine: the names and salts of ``/prefetch`` and of bodies, before their request."""
    engine = FakeEngine(echo)

    async def scenario(app: App) -> None:
        answer = await app.post("/prefetch", {"prompt_cache_key": "a"})
        assert (answer.status, answer.json()) == (200, {})
        assert (await app.post("/prefetch", {"prompt_cache_key": "b", "cache_salt": "s"})).status == 200
        body = {"prompt": ids("a"), "prompt_cache_key": "c", "cache_salt": "t"}
        assert (await app.post("/v1/completions", body)).status == 200
        for path, rest in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            assert (await app.post(path, {**rest, "prompt_cache_key": path})).status == 200
        for wrong in ({}, {"prompt_cache_key": 1}, {"prompt_cache_key": "x" * 1025}):
            assert (await app.post("/prefetch", wrong)).status == 400
        assert (await app.post("/v1/completions", {"prompt": "a", "prompt_cache_key": "\ud800"})).status == 400

    serve(scenario, engine)
    assert engine.expected[:3] == [("a", ""), ("b", "s"), ("c", "t")]
    assert engine.expected[3:] == [("/v1/chat/completions", ""), ("/v1/responses", "")]


def test_operators_endpoints() -> None:
    """Oracle: the orders that reach the engine; secrets are hidden."""

    async def scenario(app: App) -> None:
        key = {"Authorization": "Bearer sesame"}
        refused = error_of(await app.post("/start_profile", None, **key))
        assert "--profile" in refused["message"]
        assert isinstance(app.service.engine, FakeEngine)
        app.service.engine.trace_folder = "/traces"
        for path in ("/start_profile", "/stop_profile"):
            assert (await app.post(path, None, **key)).json() == {"folder": "/traces"}
        for path in ("/reset_prefix_cache", "/reset_mm_cache"):
            assert (await app.post(path, None, **key)).json() == {}
        info = await app.start("GET", "/server_info", None, **key).reply()
        assert info.json()["engine"]["model"] == "fake" and info.json()["versions"]["tp_engine"] == __version__
        assert info.json()["server"]["admin_api_key"] == "hidden" and b"sesame" not in info.content
        assert info.json()["tiers"] == {"host": {"slots": 12, "used": 3}, "disk": None}
        assert [one["rank"] for one in info.json()["memory_bytes"]] == [0, 1]

    engine = serve(scenario, config=ServerConfig(api_key=("client",), admin_api_key=("sesame",)))
    assert engine.orders == ["start_profile", "stop_profile"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"header": "from-header"}, "from-header"),
        ({"header": "from-header", "body": "from-body"}, "from-header"),
        ({"body": "from-body"}, "from-body"),
        ({"header": "two words", "body": "from-body"}, "from-body"),
        ({"header": "x" * 200}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_ids(given: dict[str, str], expected: str | None, stream: bool) -> None:
    """Oracle: vLLM's rule: the header takes precedence over the body; the answer's id and header agree."""

    async def scenario(app: App) -> None:
        headers = {"X-Request-Id": given["header"]} if "header" in given else {}
        body = {"messages": MESSAGES, "max_tokens": 2, "stream": stream, "request_id": given.get("body")}
        reply = await app.post("/v1/chat/completions", body, **headers)
        answer = reply.events[0] if stream else reply.json()
        name = reply.headers["x-request-id"]
        assert answer["id"] == f"chatcmpl-{name}" and (expected is None or name == expected)
        nowhere = (await app.get("/nowhere")).headers
        assert nowhere["x-request-id"] == nowhere["request-id"] != ""

    serve(scenario)


def test_same_request_id_twice_at_once() -> None:
    """Oracle: both are served, because clients that retry keep their ids."""

    async def scenario(app: App) -> None:
        body = {"prompt": "abc", "request_id": "again"}
        replies = await asyncio.gather(*(app.post("/v1/completions", body) for _ in range(3)))
        assert [reply.status for reply in replies] == [200] * 3

    serve(scenario, FakeEngine(echo, step_delay_s=0.01))


def test_prompts_are_truncated_and_special_tokens_added_as_asked() -> None:
    """Oracle: the last tokens of the tokenizer's encoding; -1 leaves room for max_tokens."""
    long = ids("word " * 2000)
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"prompt": "hello there", "truncate_prompt_tokens": 3}, ids("hello there")[-3:]),
        ({"prompt": "hello", "truncate_prompt_tokens": 500}, ids("hello")),
        ({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 24}, long[-(CONTEXT - 24) :]),
        ({"prompt": "hi", "add_special_tokens": False}, chat_tokenizer().encode("hi", add_special_tokens=False)),
    ]

    async def scenario(app: App) -> None:
        for body, expected in cases:
            assert (await app.post("/v1/completions", {"max_tokens": 1} | body)).status == 200
            assert isinstance(app.service.engine, FakeEngine)
            assert app.service.engine.added[-1].prompt_token_ids == expected, body
        chat = {"messages": MESSAGES, "truncate_prompt_tokens": 4, "max_tokens": 1, "return_token_ids": True}
        answer = (await app.post("/v1/chat/completions", chat)).json()
        assert len(answer["prompt_token_ids"]) == 4 == answer["usage"]["prompt_tokens"]
        for wrong in (0, -2, CONTEXT + 1):
            reply = await app.post("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": wrong})
            assert error_of(reply)["param"] == "truncate_prompt_tokens"

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "name", "prompt"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": MESSAGES}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": MESSAGES}),
        ("/v1/completions", "max_tokens", {"prompt": [5] * 40}),
        ("/v1/responses", "max_output_tokens", {"input": "Hello"}),
        ("/v1/messages", "max_tokens", {"messages": MESSAGES}),
    ],
)
def test_max_tokens_is_a_limit_and_no_reservation(path: str, name: str, prompt: dict[str, Any]) -> None:
    """Oracle: vLLM 0.32: the answer ends when the context is full; only more than the whole context is refused."""
    engine = FakeEngine(echo)

    async def scenario(app: App) -> None:
        for asked in (CONTEXT - 1, CONTEXT):
            answer = await app.post(path, {**prompt, name: asked})
            assert answer.status == 200, answer.json()
            request = engine.added[-1]
            assert request.params.max_tokens == CONTEXT - len(request.prompt_token_ids)
        for stream in (False, True):
            refused = await app.post(path, {**prompt, name: CONTEXT + 1, "stream": stream})
            message = refused.json()["error"]["message"]
            assert refused.status == 400 and str(CONTEXT) in message and name in message

    serve(scenario, engine)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """Oracle: one token must be generated; OpenAI's code.  A default of max_tokens that does not fit is no fault."""

    async def scenario(app: App) -> None:
        nearly_full = await app.post("/v1/completions", {"prompt": [5] * (CONTEXT - 3)})
        assert nearly_full.status == 200
        refused = await app.post("/v1/completions", {"prompt": [5] * CONTEXT, "max_tokens": 1})
        assert error_of(refused)["code"] == "context_length_exceeded"

    serve(scenario)


def test_tokens_as_ids() -> None:
    """Oracle: the ids themselves, in both shapes of log-probabilities and in streams."""

    async def scenario(app: App) -> None:
        common = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
        text = (await app.post("/v1/completions", {"prompt": "abc", "logprobs": 1, **common})).json()["choices"][0]
        assert text["logprobs"]["tokens"] == [f"token_id:{one}" for one in text["token_ids"]]
        assert text["logprobs"]["top_logprobs"][0].keys() == {text["logprobs"]["tokens"][0]}
        assert text["prompt_token_ids"] == ids("abc")
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "stream": True, **common}
        events = (await app.post("/v1/chat/completions", body)).events
        choices = [one["choices"][0] for one in events]
        shown = [part["token"] for one in choices if one["logprobs"] for part in one["logprobs"]["content"]]
        assert shown == [f"token_id:{one}" for choice in choices for one in choice["token_ids"]]
        assert ["prompt_token_ids" in choice for choice in choices] == [True] + [False] * (len(choices) - 1)

    serve(scenario)


def test_echoed_log_probabilities() -> None:
    """Oracle: the fake engine's -0.5 for every token but the prompt's first; texts and offsets are the prompt's own."""

    async def scenario(app: App) -> None:
        body = {"prompt": ["hello world", "abc"], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        for number, choice in enumerate((await app.post("/v1/completions", body)).json()["choices"]):
            text, found = ("hello world", "abc")[number], choice["logprobs"]
            num_prompt = len(ids(text))
            assert choice["text"].startswith(text) and "".join(found["tokens"]) == choice["text"]
            assert found["token_logprobs"] == [None] + [-0.5] * num_prompt
            assert found["top_logprobs"][0] is None and len(found["top_logprobs"]) == num_prompt + 1
            assert found["text_offset"][0] == 0 and found["text_offset"][num_prompt] == len(text)
            assert "prompt_logprobs" not in choice
        answer = (await app.post("/v1/completions", body | {"max_tokens": 0, "prompt": "hello"})).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == len(ids("hello"))

    serve(scenario)


def test_unknown_and_ignored_fields_change_nothing() -> None:
    """Oracle: the answer without them."""

    async def scenario(app: App) -> None:
        plain = (await app.post("/v1/completions", {"prompt": "abc"})).json()["choices"]
        fields = {"user": "me", "spaces_between_special_tokens": False, "top_secret": [1], "best_of": 1, "suffix": None}
        assert (await app.post("/v1/completions", {"prompt": "abc", **fields})).json()["choices"] == plain

    serve(scenario)


def test_one_finish_reason_per_choice() -> None:
    """Oracle: three prompts of two sequences, some ended by a stop string, give six reasons."""

    async def scenario(app: App) -> None:
        body = {"prompt": ["abc", "xyz", "a stop here"], "n": 2, "stop": ["stop"], "stream": True, "max_tokens": 50}
        reasons: dict[int, list[str]] = {}
        for one in (await app.post("/v1/completions", body)).events:
            for choice in one["choices"]:
                if choice["finish_reason"]:
                    reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
        assert reasons.keys() == set(range(6)) and all(len(given) == 1 for given in reasons.values())

    serve(scenario)
