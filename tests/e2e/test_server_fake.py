"""The HTTP server in its own process, against an engine without a model: OpenAI client, httpx and plain sockets."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.frontend import DEADLINE_S, RunningServer, raw_request, running_server, wait_until
from tp_engine.server.config import ServerConfig

TEXT = "héllo 😀 中文 wörld"


def test_completion(client: openai.OpenAI) -> None:
    """Oracle: the fake engine repeats the prompt, one token per byte, and ends."""
    answer = client.completions.create(model="demo", prompt=TEXT, max_tokens=100)
    num_tokens = len(TEXT.encode())
    assert answer.object == "text_completion" and answer.model == "demo"
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_tokens, num_tokens + 1)


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    """Oracle: the OpenAI reference."""
    answer = client.completions.create(model="demo", prompt="x" * 50)
    assert answer.choices[0].text == "x" * 16 and answer.choices[0].finish_reason == "length"


def test_chat_fills_the_context_unless_limited(client: openai.OpenAI) -> None:
    """Oracle: the template's whole text of the conversation."""
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "12+34="}])
    assert answer.choices[0].message.role == "assistant"
    assert "12+34=" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["中"]},
        {"stop": ["中文"], "extra_body": {"include_stop_str_in_output": True}},
        {"n": 3},
        {"logprobs": 2},
        {"echo": True},
        {"max_tokens": 9},
        {"prompt": [TEXT, "abc", "😀"], "n": 2},
        {"prompt": [[104, 105], [97, 98, 99]]},
        {"prompt": [104, 105]},
    ],
    ids=str,
)
def test_completion_stream_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Oracle: the answer without a stream."""
    request: dict[str, Any] = {"model": "demo", "prompt": TEXT, "max_tokens": 64} | options
    whole = client.completions.create(**request)
    parts: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = parts.setdefault(choice.index, {"text": "", "tokens": [], "token_logprobs": [], "text_offset": []})
            part["text"] += choice.text
            part["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                for name in ("tokens", "token_logprobs", "text_offset"):
                    part[name] += getattr(choice.logprobs, name)
    assert usage == whole.usage
    assert sorted(parts) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        part = parts[choice.index]
        assert (part["text"], part["finish_reason"]) == (choice.text, choice.finish_reason)
        if choice.logprobs is not None:
            assert part["tokens"] == choice.logprobs.tokens
            assert part["token_logprobs"] == choice.logprobs.token_logprobs


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    """Oracle: the answer without a stream; the first chunk carries the role."""
    request: dict[str, Any] = {
        "model": "alias",
        "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    whole = client.chat.completions.create(**request)
    texts, tokens, reasons = ["", ""], list[list[Any]](([], [])), [None, None]
    first: dict[Any, Any] = {}
    for chunk in client.chat.completions.create(**request, stream=True):
        assert chunk.object == "chat.completion.chunk" and chunk.model == "alias"
        for choice in chunk.choices:
            first.setdefault(choice.index, choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert first == {0: "assistant", 1: "assistant"}
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert choice.logprobs is not None and tokens[choice.index] == choice.logprobs.content


def test_stop_strings_report_their_reason(server: RunningServer) -> None:
    """Oracle: the text before the stop string, and the stop string; the server tells the engine to end the request."""
    body = {"model": "demo", "prompt": "abcdef", "stop": ["cd"], "max_tokens": 50}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    server.wait_idle()


def test_models(client: openai.OpenAI) -> None:
    """Oracle: the names given to the server."""
    assert [model.id for model in client.models.list()] == ["demo", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"model": "demo"}, 400, "prompt", None),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", None),
        ("/v1/completions", {"prompt": "x", "n": "two"}, 400, "n", None),
        ("/v1/completions", {"prompt": [5000]}, 400, None, None),
        ("/v1/completions", {"prompt": ""}, 400, None, None),
        ("/v1/completions", {"prompt": "x" * 1024}, 400, None, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "logprobs": 500}, 400, "logprobs", None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages", None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            400,
            "chat_template_kwargs",
            None,
        ),
        ("/v1/chat/completions", [], 400, None, None),
        ("/v1/nothing", {}, 404, None, "not_found"),
        ("/nothing", {}, 404, None, "not_found"),
        ("/v1/models", {}, 405, None, "method_not_allowed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_have_the_openai_shape(
    server: RunningServer, path: str, body: Any, status: int, param: str | None, code: str | None, stream: bool
) -> None:
    """Oracle: the OpenAI reference's four keys, status and codes; a stream is refused before it begins."""
    if isinstance(body, dict) and stream:
        body = body | {"stream": True}
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert error["code"] == code
    assert not server.engine.has_unfinished


def test_bad_json_and_wrong_method(server: RunningServer) -> None:
    """Oracle: 400 and 405 in the OpenAI shape; the allowed method is named."""
    answer = server.client.post("/v1/completions", content=b'{"prompt": ')
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    answer = server.client.get("/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_status_routes_and_metrics(server: RunningServer) -> None:
    """Oracle: the counters grow by the requested numbers."""
    before = metrics(server)
    server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 3})
    after = metrics(server)
    assert server.client.get("/health").json() == {"status": "ok"}

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    label = '{model_name="demo"}'
    assert grown("tp_engine:prompt_tokens_total" + label) == 4
    assert grown("tp_engine:generation_tokens_total" + label) == 3
    assert grown("tp_engine:time_to_first_token_seconds_count" + label) == 1
    assert grown("tp_engine:inter_token_latency_seconds_count" + label) == 2
    assert grown("tp_engine:e2e_request_latency_seconds_count" + label) == 1
    assert grown('tp_engine:request_success_total{finished_reason="length",model_name="demo"}') == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f"tp_engine:{name}{label}" in after


def test_the_engine_is_watched(server: RunningServer) -> None:
    """Oracle: the server samples once per second by itself; each look adds one sample at most."""

    def num_samples() -> int:
        return len(server.client.get("/engine").json()["history"]["age_s"])

    def grows_by_itself() -> bool:
        before = num_samples()
        time.sleep(2.3)
        return num_samples() >= before + 2

    wait_until(grows_by_itself, "samples that no client asked for")
    page = server.client.get("/engine").json()
    assert page["model"]["name"] == "demo" and page["requests"]["running"] == 0
    assert page["history"]["age_s"] == sorted(page["history"]["age_s"], reverse=True)


def metrics(server: RunningServer) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["queued", "first token", "decode"])
def test_a_client_that_leaves_is_aborted(server: RunningServer, stream: bool, phase: str) -> None:
    """Oracle: the engine records the abort of a request that gets no further meanwhile."""
    engine = server.engine
    num_added, num_aborted, num_steps = len(engine.added), len(engine.aborted), engine.num_steps
    engine.max_running = 0 if phase == "queued" else 64
    with raw_request(server, {"prompt": "x", "max_tokens": 1000, "stream": stream, "ignore_eos": True}):
        wait_until(lambda: len(engine.added) > num_added, "the request to arrive")
        steps = {"queued": 3, "first token": 1, "decode": 40}[phase]
        wait_until(lambda: engine.num_steps >= num_steps + steps, "the steps")
        engine.max_running = 0
    server.wait_idle()
    engine.max_running = 64
    assert engine.aborted[num_aborted:] == [engine.added[-1].request_id]


def test_a_plain_socket_sees_whole_events(server: RunningServer) -> None:
    """Oracle: the format of server-sent events, down to the terminator."""
    with raw_request(server, {"prompt": "ab", "max_tokens": 8, "stream": True}) as connection:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
    assert rest.count(b"data: ") >= 3 and b"data: [DONE]\n\n" in rest


def test_api_key_guards_every_route_but_the_status() -> None:
    """Oracle: 401 without the key or with a wrong one, 200 with it; probes need no key."""
    with running_server(config=ServerConfig(port=0, api_key=("sesame",))) as server:
        refused: list[Any] = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": b"sesame"}]
        for headers in refused:
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"),
                ("POST", "//v1/completions"),
                ("GET", "/v1/none"),
                ("GET", "/docs"),
            ):
                answer = httpx.request(method, server.url + path, headers=headers, timeout=DEADLINE_S)
                assert answer.status_code == 401, (path, headers)
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/live", "/health", "/ready", "/metrics"):
            assert httpx.get(server.url + path, timeout=DEADLINE_S).status_code == 200
