"""What clients of other servers are used to: addresses, defaults, names of fields, and forms of chats."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion

from tests.asgi import App, run_served
from tests.e2e.frontend import INFO
from tests.e2e.scripted import say
from tests.fake_engine import MODEL_INFO, FakeEngine
from tests.pooling_models import eos_tokenizer, yes_no_tokenizer
from tests.tiny_server import chat_tokenizer, tiny_engine
from tests.unit.server.test_server_api import MESSAGES, error_of, ids, serve
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.config import DEMO_MODEL
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import RequestError
from tp_engine.grammar.compiler import compile_grammar
from tp_engine.grammar.vocabulary import byte_vocabulary
from tp_engine.model_config.classifier import YES_OR_NO
from tp_engine.server.config import ServerConfig

LONG = "x" * 5000
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def run(scenario: Callable[[App], Awaitable[None]], **config: Any) -> None:
    run_served(scenario, FakeEngine(say, model_info=INFO), load_tokenizer(str(DEMO_MODEL)), ServerConfig(**config))


@pytest.mark.parametrize("config", [{}, {"root_path": "/llm"}, {"api_key": ("k",)}])
def test_a_slash_at_the_end_changes_nothing(config: dict[str, Any]) -> None:
    """Oracle: the same address without it, also under a root path and with a key."""

    async def scenario(app: App) -> None:
        headers = {"Authorization": "Bearer k"}
        for path in ("/v1/models", "/v1/models/demo", "/health", "/version", "/"):
            plain, slash = [await app.start("GET", one, **headers).reply() for one in (path, path.rstrip("/") + "/")]
            assert (slash.status, slash.content) == (plain.status, plain.content) and plain.status == 200, path
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert (await app.post("/v1/chat/completions/", body, **headers)).status == 200
        assert (await app.start("HEAD", "/v1/models/", **headers).reply()).status == 200
        assert (await app.start("GET", "/nothing/", **headers).reply()).status == 404
        if "root_path" in config:
            for path in ("/llm/", "/llm/v1/models/"):
                assert (await app.start("GET", path, **headers).reply()).status == 200, path

    run(scenario, **config)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "gzip, deflate"])
def test_a_compressed_body_is_415_with_its_encoding(encoding: str) -> None:
    """Oracle: the status, and the encoding's name in the message; ``identity`` is no encoding."""

    async def scenario(app: App) -> None:
        plain = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        reply = await app.post("/v1/completions", gzip.compress(plain), **{"Content-Encoding": encoding})
        assert reply.status == 415 and reply.headers["connection"] == "close"
        assert encoding.lower() in error_of(reply)["message"] and error_of(reply)["code"] == "unsupported_encoding"
        assert (await app.post("/v1/completions", plain, **{"Content-Encoding": "identity"})).status == 200

    serve(scenario)


def test_an_empty_model_is_the_default_one() -> None:
    """Oracle: vLLM: as if it were absent, on every endpoint; the answer has the first name."""

    async def scenario(app: App) -> None:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/responses", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            reply = await app.post(path, body | {"model": ""})
            assert reply.status == 200 and reply.json().get("model", "demo") == "demo", path

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"instructions": LONG, "input": [{"role": "user", "content": "a"}]}, "input"),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 9999}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9999}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9999}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages"),
    ],
)
def test_errors_name_the_field_of_the_endpoint(path: str, body: dict[str, Any], param: str) -> None:
    """Oracle: the field that the client sent, not that of another endpoint; streams too."""

    async def scenario(app: App) -> None:
        for more in ({}, {"stream": True}) if path != "/tokenize" else ({},):
            reply = await app.post(path, body | more)
            assert reply.status == 400 and error_of(reply)["param"] == param

    serve(scenario)


class Crowded(FakeEngine):
    """Refuses each request as the scheduler does one that its KV cache cannot hold."""

    def add_request(self, request: Any) -> None:
        raise RequestError("too long for the KV cache", param=request.prompt_field, code="context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/responses", {"input": "a"}, "input"),
    ],
)
def test_the_engine_names_the_field_too(path: str, body: dict[str, Any], param: str) -> None:
    """Oracle: the field that the client sent."""

    async def scenario(app: App) -> None:
        for more in ({}, {"stream": True}):
            assert error_of(await app.post(path, body | more))["param"] == param

    serve(scenario, Crowded())


@pytest.mark.parametrize(
    ("name", "neutral", "refused"),
    [
        ("logprob_token_ids", [], [5]),
        ("thinking_token_budget", -1, 10),
        ("kv_transfer_params", {"x": 1}, None),
    ],
)
def test_fields_of_vllm_that_are_not_here(name: str, neutral: Any, refused: Any) -> None:
    """Oracle: docs/http_api.md: refused by name where an answer would differ, else without effect."""

    async def scenario(app: App) -> None:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/responses", {"input": "a"}),
        ]  # fmt: skip
        for path, body in bodies:
            assert (await app.post(path, body | {name: neutral})).status == 200
            if refused is not None:
                reply = await app.post(path, body | {name: refused})
                assert reply.status == 400 and error_of(reply)["param"] == name

    serve(scenario)


@pytest.mark.parametrize("include", [None, False, True])
def test_usage_of_each_chunk(include: bool | None) -> None:
    """Oracle: vLLM: the role comes with 0 tokens, then as many as were sent; none without ``include_usage``."""

    async def scenario(app: App) -> None:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "SAY:abc"}]}),
            ("/v1/completions", {"prompt": "SAY:abc"}),
        ):
            options = {"include_usage": include, "continuous_usage_stats": True}
            events = (await app.post(path, body | {"stream": True, "stream_options": options})).events
            usage = [one.get("usage") for one in events]
            if not include:
                assert usage == [None] * len(events)
                continue
            counts = [one["completion_tokens"] for one in usage]
            assert counts == ([0, 1, 2, 3, 4, 4] if "chat" in path else [1, 2, 3, 4, 4])
            assert events[-1]["choices"] == []

    run(scenario)


def test_prompt_log_probabilities_of_a_chat_are_in_its_body() -> None:
    """Oracle: vLLM's place; the official client's type."""

    async def scenario(app: App) -> None:
        answer = (await app.post("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 0})).json()
        ChatCompletion.model_validate(answer)
        assert "prompt_logprobs" not in answer["choices"][0] and answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]

    serve(scenario)


def test_all_alternatives_of_a_chat(tmp_path: Path) -> None:
    """Oracle: vLLM: -1 is all tokens, whose probabilities add up to one."""

    async def scenario(app: App) -> None:
        for asked in (-1, 384, 100_000):
            body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": asked, "max_tokens": 1}
            reply = await app.post("/v1/chat/completions", body)
            (token,) = reply.json()["choices"][0]["logprobs"]["content"]
            assert len(token["top_logprobs"]) == 384
            assert math.isclose(sum(math.exp(one["logprob"]) for one in token["top_logprobs"]), 1.0, rel_tol=1e-4)

    with tiny_engine(tmp_path / "model", max_logprobs=-1) as engine:
        run_served(scenario, engine, chat_tokenizer())


def test_a_truncated_prompt_is_echoed_as_it_was_read() -> None:
    """Oracle: the tokenizer; offsets of the echo are places in it."""

    async def scenario(app: App) -> None:
        text = "hello world, again"
        for side, kept in (("left", ids(text)[-4:]), ("right", ids(text)[:4])):
            body = {"prompt": text, "truncate_prompt_tokens": 4, "truncation_side": side, "echo": True, "logprobs": 0}
            (choice,) = (await app.post("/v1/completions", body | {"max_tokens": 0})).json()["choices"]
            assert choice["text"] == chat_tokenizer().decode(kept)
            offsets = choice["logprobs"]["text_offset"]
            assert all(
                choice["text"].startswith(token, offset)
                for token, offset in zip(choice["logprobs"]["tokens"], offsets, strict=True)
            )
        assert (await app.post("/v1/completions", {"prompt": "a", "truncation_side": "top"})).status == 400

    serve(scenario)


def test_seeds_of_minus_one_differ() -> None:
    """Oracle: what reaches the engine is a request without a seed."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", {"prompt": "a", "seed": -1, "max_tokens": 1})

    assert serve(scenario).added[0].params.seed is None


class Compiling(FakeEngine):
    """Refuses each request whose constraint the grammar library refuses, in the library's words."""

    def add_request(self, request: Any) -> None:
        compile_grammar(request.params.structured_outputs, byte_vocabulary())
        super().add_request(request)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_tool_whose_schema_can_not_be_kept_is_named(choice: Any) -> None:
    """Oracle: the client's own names: the field ``tools``, and the strict tool's."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)x"}}}
    strict = {"name": "g", "parameters": parameters, "strict": True}
    chat = {"messages": MESSAGES, "tools": [FUNCTION, {"type": "function", "function": strict}], "tool_choice": choice}
    tools = [{"type": "function", **FUNCTION["function"]}, {"type": "function", **strict}]
    response = {
        "input": "a",
        "tools": tools,
        "tool_choice": choice if choice == "required" else {"type": "function", "name": "g"},
    }

    async def scenario(app: App) -> None:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            reply = await app.post(path, body)
            assert reply.status == 400 and error_of(reply)["param"] == "tools"
            assert error_of(reply)["message"].startswith("tools: the parameters of 'g': "), error_of(reply)

    serve(scenario, Compiling())


def choice_of(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_of_a_chat() -> None:
    """Oracle: OpenAI's form for chats: the model sees only these, and ``required`` forces one of them."""
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}
    message = {"role": "user", "content": 'SAY:<tool_call>{"name": "g", "arguments": {}}</tool_call>'}
    body = {"messages": [message], "tools": [FUNCTION, other]}

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/chat/completions", body | {"tool_choice": choice_of("required", "g")})
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "g"
        added = app.service.engine.added[-1]
        grammar = added.params.structured_outputs.grammar
        assert r"\"f\"" not in grammar and r"\"g\"" in grammar
        assert (await app.post("/v1/chat/completions", body | {"tool_choice": choice_of("auto", "f")})).status == 200
        for wrong in (choice_of("auto"), choice_of("auto", "h"), choice_of("named", "f"), {"type": "allowed_tools"}):
            reply = await app.post("/v1/chat/completions", body | {"tool_choice": wrong})
            assert reply.status == 400 and error_of(reply)["param"] == "tool_choice", wrong

    run(scenario, enable_auto_tool_choice=True, tool_call_parser="hermes")


def test_parts_of_a_chat() -> None:
    """Oracle: the same chat as text; a note stands for a picture in a tool's answer, and only there."""

    def rendered(*messages: dict[str, Any]) -> str:
        return ChatFormat(chat_tokenizer()).render(messages).text

    def of(role: str, *parts: Any) -> dict[str, Any]:
        return {"role": role, "content": list(parts)}

    text = rendered({"role": "user", "content": "a"})
    for part in ("a", {"type": "input_text", "text": "a"}, {"type": "output_text", "text": "a", "annotations": []}):
        assert rendered(of("user", part)) == text
    no = {"role": "assistant", "content": "No."}
    assert rendered(of("assistant", {"type": "refusal", "refusal": "No."})) == rendered(no)
    assert rendered(of("assistant", {"type": "thinking", "thinking": "Hm."}, "No.")) == rendered(no)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "b\n[image omitted]" in rendered(of("tool", {"type": "text", "text": "b"}, image))
    with pytest.raises(RequestError, match="image_url"):
        rendered(of("user", image))


@pytest.mark.parametrize(
    ("convert", "path", "body"),
    [
        ("none", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}),
        ("none", "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}),
        ("embed", "/v1/embeddings", {"input": ["a", "b"]}),
        ("classify", "/score", {"queries": "a", "documents": ["b"]}),
        ("classify", "/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_invocations(convert: str, path: str, body: dict[str, Any]) -> None:
    """Oracle: the route that the fields belong to, but for ids and times."""

    async def scenario(app: App) -> None:
        replies = [await app.post(one, body | {"request_id": "r"}) for one in (path, "/invocations")]
        assert [reply.status for reply in replies] == [200, 200]
        shown: list[Any]
        if body.get("stream"):
            shown = [[one["choices"] for one in reply.events] for reply in replies]
        else:
            shown = [{**reply.json(), "created": 0} for reply in replies]
        assert shown[0] == shown[1]
        for wrong in (b"[]", b"{}", b"{", b'{"documents": []}'):
            assert (await app.post("/invocations", wrong)).status == 400

    classifier = YES_OR_NO if convert == "classify" else None
    info = msgspec.structs.replace(MODEL_INFO, convert=convert, classifier=classifier, hidden_size=4, dimensions=())
    tokenizer = {"none": chat_tokenizer, "embed": eos_tokenizer, "classify": yes_no_tokenizer}[convert]()
    run_served(scenario, FakeEngine(model_info=info), tokenizer)


def test_beams_have_the_texts_of_their_tokens() -> None:
    """Oracle: the text of the beam; its character spans two tokens, which the search finds one by one."""
    said = "é!".encode()

    async def scenario(app: App) -> None:
        body = {"prompt": [5], "use_beam_search": True, "logprobs": 1, "max_tokens": 3}
        (choice,) = (await app.post("/v1/completions", body)).json()["choices"]
        assert choice["text"] == "é!"
        assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1]

    engine = FakeEngine(lambda request: [said[len(request.prompt_token_ids) - 1]], model_info=INFO)
    run_served(scenario, engine, load_tokenizer(str(DEMO_MODEL)))
