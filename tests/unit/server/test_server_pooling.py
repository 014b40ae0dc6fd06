"""Embeddings, scores and ranks over HTTP, in front of an engine without a model: shapes, usage, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.asgi import App, run_served, until
from tests.fake_engine import MODEL_INFO, FakeEngine, fake_pooled
from tests.pooling_models import eos_tokenizer, yes_no_tokenizer
from tests.tiny_server import chat_tokenizer
from tp_engine.model_config.classifier import YES_OR_NO, ClassifierSpec, HeadLinear
from tp_engine.server.config import ServerConfig

EMBED = msgspec.structs.replace(MODEL_INFO, convert="embed", hidden_size=4, dimensions=())
LABELS = ClassifierSpec(
    labels=("long", "first", "last", "one"),
    activation="softmax",
    linears=(HeadLinear(name="score", out_size=4, has_bias=False),),
)
HEAD = msgspec.structs.replace(MODEL_INFO, convert="classify", classifier=LABELS, hidden_size=4)
RANK = msgspec.structs.replace(MODEL_INFO, convert="classify", classifier=YES_OR_NO, hidden_size=4)


def serve(scenario: Callable[[App], Awaitable[None]], info: Any = EMBED, config: ServerConfig | None = None) -> None:
    tokenizer = yes_no_tokenizer() if info.convert == "classify" else eos_tokenizer()
    run_served(scenario, FakeEngine(model_info=info), tokenizer, config)


def expected(text: str | list[int], dimensions: int = 4) -> list[float]:
    """The fake engine's state of this input, cut and divided by its length."""
    from tp_engine.requests.request import EngineRequest, Pooling
    from tp_engine.requests.sampling_params import SamplingParams

    ids = eos_tokenizer().encode(text) if isinstance(text, str) else text
    request = EngineRequest(request_id="", prompt_token_ids=ids, params=SamplingParams(), pooling=Pooling())
    state = fake_pooled(request)[:dimensions].astype(np.float64)
    found: list[float] = (state / np.linalg.norm(state)).tolist()
    return found


def test_embeddings() -> None:
    """Oracle: the fake engine's states and the tokenizer's counts; OpenAI's shape; base64 is the same in float32."""

    async def scenario(app: App) -> None:
        cases: list[tuple[Any, list[Any]]] = [
            ("hi", ["hi"]),
            (["hi", "the quick"], ["hi", "the quick"]),
            ([5, 6], [[5, 6]]),
            ([[5, 6], [7]], [[5, 6], [7]]),
        ]
        for given, inputs in cases:
            reply = (await app.post("/v1/embeddings", {"model": "alias", "input": given})).json()
            assert reply["object"] == "list" and reply["model"] == "alias" and reply["id"].startswith("embd-")
            count = sum(len(one if isinstance(one, list) else eos_tokenizer().encode(one)) for one in inputs)
            assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == count
            assert reply["usage"]["completion_tokens"] == 0
            for index, (one, data) in enumerate(zip(inputs, reply["data"], strict=True)):
                assert (data["index"], data["object"]) == (index, "embedding")
                assert data["embedding"] == pytest.approx(expected(one), abs=1e-6)
        coded = (await app.post("/v1/embeddings", {"input": "hi", "encoding_format": "base64"})).json()
        vector = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
        assert vector.tolist() == pytest.approx(expected("hi"), abs=1e-6)
        cut = (await app.post("/v1/embeddings", {"input": "hi", "dimensions": 2})).json()
        assert cut["data"][0]["embedding"] == pytest.approx(expected("hi", 2), abs=1e-6)
        raw = (await app.post("/v1/embeddings", {"input": [9, 8], "use_activation": False})).json()
        assert raw["data"][0]["embedding"] == [2.0, 9.0, 8.0, 1.0]
        metrics = (await app.get("/metrics")).content.decode().splitlines()
        (line,) = [one for one in metrics if one.startswith("tp_engine:generation_tokens_total")]
        assert float(line.split()[-1]) == 0

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/v1/embeddings", {}, "input", "missing"),
        ("/v1/embeddings", {"input": []}, "input", "empty list"),
        ("/v1/embeddings", {"input": [5, -1]}, "input", "-1"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]", "empty"),
        ("/v1/embeddings", {"input": [[5], [1000]]}, "input[1]", "1000"),
        ("/v1/embeddings", {"input": [7] * 1025}, "input", "1025 tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "from 1 to 4"),
        ("/v1/embeddings", {"input": "a", "normalize": True}, "normalize", "use_activation"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "no streams"),
        ("/v1/embeddings", {"input": "a", "model": "x"}, "model", "does not exist"),
        ("/v1/completions", {"prompt": "a"}, "model", "/v1/embeddings"),
        ("/score", {"queries": "a"}, "documents", "neither is given"),
        ("/score", {"queries": "a", "text_1": "b", "documents": "c"}, "queries", "both are given"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "queries", "2 queries for 3 documents"),
        ("/score", {"queries": "a", "documents": "b", "instruction": "c"}, "instruction", "takes none"),
        ("/score", {"queries": ["a", "b" * 5000], "documents": "c"}, "queries", "2 queries"),
        ("/score", {"queries": ["b" * 5000, "a"], "documents": ["c", "d"]}, "queries[0]", "reduce its length"),
        ("/score", {"text_1": "a", "text_2": ["b", "c" * 5000]}, "text_2[1]", "reduce its length"),
        ("/score", {"queries": "a", "documents": "b" * 5000}, "documents", "reduce its length"),
        ("/rerank", {"query": "a" * 5000, "documents": ["b"]}, "query", "reduce its length"),
        ("/rerank", {"query": "a", "documents": ["b", "c", "d" * 5000]}, "documents[2]", "reduce its length"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents", '"text"'),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "at least 1"),
    ],
)
def test_bodies_that_are_refused(path: str, body: dict[str, Any], param: str, text: str) -> None:
    """Oracle: 400 (404 for a model), the field, and the value, rule or remedy in the message; nothing runs."""

    async def scenario(app: App) -> None:
        reply = await app.post(path, body)
        error = reply.json()["error"]
        assert reply.status == (404 if param == "model" and path == "/v1/embeddings" else 400), error
        assert error["param"] == param and text in error["message"], error
        assert isinstance(app.service.engine, FakeEngine) and not app.service.engine.added

    serve(scenario)


def test_the_embedding_of_a_chat() -> None:
    """Oracle: the embedding of the prompt that ``/tokenize`` tells for the same messages, by its token ids."""

    async def scenario(app: App) -> None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
        for begins in (False, True):
            chat = {"messages": messages, "add_generation_prompt": begins}
            tokens = (await app.post("/tokenize", chat)).json()["tokens"]
            by_chat, by_ids = [(await app.post("/v1/embeddings", body)).json() for body in (chat, {"input": tokens})]
            assert by_chat["data"] == by_ids["data"] and by_chat["usage"] == by_ids["usage"]
        refused: tuple[dict[str, Any], ...] = (
            {},
            {"input": "x", "messages": messages},
            {"messages": []},
            {"messages": [{"role": "user"}]},
        )
        for body in refused:
            assert (await app.post("/v1/embeddings", body)).status == 400

    run_served(scenario, FakeEngine(model_info=EMBED), chat_tokenizer())


def test_scores() -> None:
    """Oracle: the fake engine's logits, longer pairs scoring less; all paths and both names give the same."""

    async def scenario(app: App) -> None:
        body = {"queries": "q", "documents": ["a", "a longer one"]}
        first = (await app.post("/score", body)).json()
        assert first["object"] == "list" and first["id"].startswith("score-")
        lengths = [len(request.prompt_token_ids) for request in app.service.engine.added]
        logits = np.array([10 - 0.125 * length for length in lengths])
        assert [one["score"] for one in first["data"]] == pytest.approx((1 / (1 + np.exp(-logits))).tolist())
        assert [(one["index"], one["object"]) for one in first["data"]] == [(0, "score"), (1, "score")]
        assert first["usage"]["prompt_tokens"] == sum(lengths)
        former = (await app.post("/v1/score", {"text_1": "q", "text_2": ["a", "a longer one"]})).json()
        assert former["data"] == first["data"]

    serve(scenario, RANK)


def test_ranks() -> None:
    """Oracle: the fake engine favours short documents; the document comes along unless it is not wanted."""

    async def scenario(app: App) -> None:
        body = {"query": "q", "documents": ["the longest one", "a", {"text": "long one"}]}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            reply = (await app.post(path, body)).json()
            assert [one["index"] for one in reply["results"]] == [1, 2, 0]
            assert [one["document"]["text"] for one in reply["results"]] == ["a", "long one", "the longest one"]
            scores = [one["relevance_score"] for one in reply["results"]]
            assert scores == sorted(scores, reverse=True) and reply["usage"]["total_tokens"] > 0
        best = (await app.post("/rerank", body | {"top_n": 1, "return_documents": False})).json()
        assert [set(one) for one in best["results"]] == [{"index", "relevance_score"}]
        assert best["results"][0]["index"] == 1
        generated = await app.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert generated.status == 200, "a reranker generates text too"
        refused = (await app.post("/v1/embeddings", {"input": "hi"})).json()
        assert "--convert embed" in refused["error"]["message"]

    serve(scenario, RANK)


def softmax(scores: Any) -> list[float]:
    powers = np.exp(np.array(scores, dtype=np.float64) - np.max(scores))
    found: list[float] = (powers / powers.sum()).tolist()
    return found


def test_classes() -> None:
    """Oracle: the fake engine's scores and a softmax; vLLM's shape; token ids and messages are inputs too."""

    async def scenario(app: App) -> None:
        reply = (await app.post("/classify", {"model": "alias", "input": ["hi"]})).json()
        assert reply["object"] == "list" and reply["model"] == "alias" and reply["id"].startswith("classify-")
        body = {"input": [[5, 9, 1], [7, 2]]}
        for path in ("/classify", "/v1/classify", "/invocations"):
            reply = (await app.post(path, body)).json()
            first, second = reply["data"]
            assert (first["index"], first["label"], first["num_classes"]) == (0, "first", 4)
            assert first["probs"] == pytest.approx(softmax([3, 5, 1, 1]), abs=1e-6)
            assert (second["index"], second["label"]) == (1, "first")
            assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 5
        plain = (await app.post("/classify", {**body, "use_activation": False})).json()
        assert plain["data"][0]["probs"] == [3.0, 5.0, 1.0, 1.0]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        tokens = (await app.post("/tokenize", {**chat, "add_generation_prompt": False})).json()["tokens"]
        by_chat, by_ids = [(await app.post("/classify", one)).json() for one in (chat, {"input": tokens})]
        assert by_chat["data"] == by_ids["data"]

    run_served(scenario, FakeEngine(model_info=HEAD), chat_tokenizer())


def test_pooled_numbers() -> None:
    """Oracle: the fake engine's scores, of the last token or of each, and states; base64 is the same in float32."""

    async def scenario(app: App) -> None:
        body = {"input": [5, 9, 1], "use_activation": False}
        for task, expected in (
            (None, [3.0, 5.0, 1.0, 1.0]),
            ("classify", [3.0, 5.0, 1.0, 1.0]),
            ("token_classify", [[0.0, 5.0, 0.0, 1.0], [1.0, 9.0, 0.0, 1.0], [2.0, 1.0, 0.0, 1.0]]),
        ):
            reply = (await app.post("/pooling", {**body, "task": task})).json()
            assert reply["id"].startswith("pool-") and reply["data"] == [
                {"index": 0, "object": "pooling", "data": expected}
            ]
            coded = (await app.post("/v1/pooling", {**body, "task": task, "encoding_format": "base64"})).json()
            numbers = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), dtype="<f4")
            assert numbers.tolist() == np.array(expected).ravel().tolist()
        probs = (await app.post("/pooling", {"input": [5, 9, 1], "task": "token_classify"})).json()["data"][0]["data"]
        assert probs[1] == pytest.approx(softmax([1, 9, 0, 1]), abs=1e-6)

    serve(scenario, HEAD)

    async def vectors(app: App) -> None:
        reply = (await app.post("/pooling", {"input": [9, 8], "dimensions": 2})).json()
        assert reply["data"][0]["data"] == pytest.approx(expected([9, 8], 2), abs=1e-6)

    serve(vectors, EMBED)


@pytest.mark.parametrize(
    ("info", "path", "body", "param", "text"),
    [
        (EMBED, "/classify", {"input": "a"}, "model", "not served for classification"),
        (MODEL_INFO, "/classify", {"input": "a"}, "model", "ForSequenceClassification"),
        (MODEL_INFO, "/pooling", {"input": "a"}, "model", "--convert embed"),
        (RANK, "/pooling", {"input": "a", "task": "token_classify"}, "model", "ForTokenClassification"),
        (HEAD, "/v1/embeddings", {"input": "a"}, "model", "--convert embed"),
        (HEAD, "/v1/completions", {"prompt": "a"}, "model", "/classify"),
        (HEAD, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "/classify"),
        (HEAD, "/score", {"queries": "a", "documents": "b"}, "model", "has 4 labels"),
        (HEAD, "/rerank", {"query": "a", "documents": ["b"]}, "model", "has 4 labels"),
        (HEAD, "/pooling", {"input": "a", "task": "token_embed"}, "task", "classify, token_classify"),
        (HEAD, "/pooling", {"input": "a", "task": ""}, "task", "classify, token_classify"),
        (HEAD, "/pooling", {"input": "a", "dimensions": 2}, "dimensions", "a number for each label"),
        (HEAD, "/classify", {}, "input", "missing"),
        (HEAD, "/classify", {"input": []}, "input", "empty list"),
        (HEAD, "/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "both"),
        (HEAD, "/classify", {"input": "a", "activation": True}, "activation", "use_activation"),
        (HEAD, "/classify", {"input": [[5], [1000]]}, "input[1]", "1000"),
        (HEAD, "/classify", {"input": "a", "stream": True}, "stream", "no streams"),
        (HEAD, "/classify", {"input": "a", "use_activation": "no"}, "use_activation", "boolean"),
    ],
)
def test_classes_that_are_refused(info: Any, path: str, body: dict[str, Any], param: str, text: str) -> None:
    """Oracle: 400, the field, and the value, rule or remedy in the message; nothing runs."""

    async def scenario(app: App) -> None:
        reply = await app.post(path, body)
        error = reply.json()["error"]
        assert reply.status == 400 and error["param"] == param and text in error["message"], error
        assert isinstance(app.service.engine, FakeEngine) and not app.service.engine.added

    run_served(scenario, FakeEngine(model_info=info), chat_tokenizer())


def test_a_client_that_leaves_ends_its_inputs() -> None:
    """Oracle: the engine is told to abort all of them, and nothing is held."""

    async def scenario(app: App) -> None:
        engine = app.service.engine
        assert isinstance(engine, FakeEngine)
        engine.max_running = 0
        exchange = app.start("POST", "/v1/embeddings", {"input": ["a", "b"]})
        await until(lambda: len(engine.added) == 2, "both inputs")
        exchange.leave()
        await exchange.ended()
        await until(lambda: len(engine.aborted) == 2, "the end of both")
        assert app.state.limit.num_prompts == 0

    serve(scenario)


def test_too_many_inputs_are_refused() -> None:
    """Oracle: 400 at once, with the numbers, as they never fit; each input is a prompt of its own."""

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/embeddings", {"input": ["a"] * 70})
        assert reply.status == 400 and "the body has 70 prompts; this server takes at most 66" in reply.content.decode()
        assert reply.json()["error"]["param"] == "input" and "retry-after" not in reply.headers

    serve(scenario, config=ServerConfig(max_num_queued_reqs=2))
