"""Vectors as bytes and as Cohere's API has them; queries that are cut; scores that are no probabilities."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from tests.asgi import App
from tests.unit.server.test_server_pooling import EMBED, RANK, expected, serve
from tp_engine.api.openai.encoded_vectors import EmbedDtype, encoded_vector

DTYPES: dict[EmbedDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_as_bytes(dtype: EmbedDtype) -> None:
    """Oracle: PyTorch's own conversion, of values of all sizes that the type has and of those halfway between."""
    rng = np.random.default_rng(0)
    sizes = [2.0**exponent for exponent in range(-18, 9)]
    values = np.concatenate([rng.standard_normal(200).astype(np.float32) * np.float32(size) for size in sizes])
    grid = np.arange(-4096, 4096, dtype=np.float32) / 256
    values = np.concatenate((np.clip(values, -440, 440), grid, grid / 4096, [0.0, -0.0])).astype(np.float32)
    wanted = torch.from_numpy(values).to(DTYPES[dtype])
    raw = wanted.view(torch.uint8).numpy().tobytes()
    assert encoded_vector(values, dtype, "little") == raw
    swapped = np.frombuffer(raw, np.uint8).reshape(-1, wanted.itemsize)[:, ::-1].tobytes()
    assert encoded_vector(values, dtype, "big") == swapped
    assert encoded_vector(values, dtype, "native") == raw, "the tests run on little-endian machines"


def test_the_type_of_embeddings() -> None:
    """Oracle: the vector of the request without the fields, rounded by PyTorch; a list has all digits."""

    async def scenario(app: App) -> None:
        for dtype, kind in DTYPES.items():
            body = {"input": "hi", "encoding_format": "base64", "embed_dtype": dtype}
            for endianness in (None, "little", "native"):
                coded = (await app.post("/v1/embeddings", body | {"endianness": endianness})).json()
                raw = base64.b64decode(coded["data"][0]["embedding"])
                assert len(raw) == 4 * kind.itemsize
                found = torch.frombuffer(bytearray(raw), dtype=kind).to(torch.float32)
                wanted = torch.tensor(expected("hi"), dtype=torch.float32).to(kind).to(torch.float32)
                torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0.13 if kind.itemsize == 1 else 1e-2)
        plain = (await app.post("/v1/embeddings", {"input": "hi", "embed_dtype": "float16"})).json()
        assert plain["data"][0]["embedding"] == pytest.approx(expected("hi"), abs=1e-6)
        for field in ("embed_dtype", "endianness"):
            refused = await app.post("/v1/embeddings", {"input": "hi", field: "int3"})
            assert refused.status == 400 and refused.json()["error"]["param"] == field

    serve(scenario)


def test_cohere_embeddings() -> None:
    """Oracle: the vectors of ``/v1/embeddings``; signs packed by hand; the fields that Cohere's client reads."""

    async def scenario(app: App) -> None:
        body = {"model": "alias", "texts": ["hi", "the quick"], "input_type": "search_query"}
        reply = (await app.post("/v2/embed", body)).json()
        assert reply["embeddings"].keys() == {"float"} and reply["texts"] == body["texts"]
        for text, vector in zip(("hi", "the quick"), reply["embeddings"]["float"], strict=True):
            assert vector == pytest.approx(expected(text), abs=1e-6)
        plain = (await app.post("/v1/embeddings", {"input": body["texts"]})).json()
        assert reply["meta"]["billed_units"] == {"input_tokens": plain["usage"]["prompt_tokens"]}
        inputs = {"inputs": [{"content": [{"type": "text", "text": "hi"}]}], "embedding_types": ["base64", "float"]}
        reply = (await app.post("/v2/embed", inputs)).json()
        coded = np.frombuffer(base64.b64decode(reply["embeddings"]["base64"][0]), dtype="<f4")
        assert coded.tolist() == pytest.approx(reply["embeddings"]["float"][0])
        cut = (await app.post("/v2/embed", {"texts": ["hi"], "output_dimension": 2})).json()
        assert cut["embeddings"]["float"][0] == pytest.approx(expected("hi", 2), abs=1e-6)
        long = "fox " * 2000  # cut at its end unless the request says otherwise
        for truncate, status in ((None, 200), ("END", 200), ("START", 200), ("NONE", 400)):
            found = await app.post("/v2/embed", {"texts": [long], "truncate": truncate})
            assert found.status == status, truncate
        for wrong, param in (
            ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
            ({"texts": ["a"], "embedding_types": ["binary"]}, "embedding_types"),  # of four numbers
            ({"texts": []}, "texts"),
            ({}, "texts"),
            ({"texts": ["a"], "inputs": []}, "texts"),
            ({"images": ["data:image/png;base64,AA=="]}, "images"),
            ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs"),
            ({"texts": ["a"], "output_dimension": 9}, "output_dimension"),
            ({"texts": ["a", long], "truncate": "NONE"}, "texts[1]"),
            ({"inputs": [{"content": [{"type": "text", "text": long}]}], "truncate": "NONE"}, "inputs[0]"),
        ):
            refused = await app.post("/v2/embed", wrong)
            assert (refused.status, refused.json()["error"]["param"]) == (400, param), wrong

    serve(scenario)


def test_packed_signs() -> None:
    """Oracle: by hand: the first number is the highest bit; ``binary`` is 128 less."""
    from tp_engine.api.openai.encoded_vectors import packed_signs

    values = np.array([1, -1, 0, -1, 1, 1, -1, -1] + [-1] * 8, dtype=np.float32)
    assert packed_signs(values, signed=False) == [0b10101100, 0]
    assert packed_signs(values, signed=True) == [0b10101100 - 128, -128]


def test_queries_are_cut() -> None:
    """Oracle: the prompts of texts that are as short; documents are cut on their own."""

    async def scenario(app: App) -> None:
        async def usage(path: str, **fields: Any) -> int:
            reply = await app.post(path, fields)
            assert reply.status == 200, reply.content
            found: int = reply.json()["usage"]["prompt_tokens"]
            return found

        long, short = "fox " * 50, "fox"
        for cut, query, document in ((3, long, short), (None, long, short)):
            rank = await usage("/rerank", query=query, documents=[document] * 2, max_tokens_per_query=cut)
            whole = await usage("/rerank", query=query, documents=[document] * 2)
            score = await usage("/score", queries=query, documents=[document] * 2, max_tokens_per_query=cut)
            assert score == rank and (rank < whole - 60) is (cut is not None)
        both = await usage("/rerank", query=long, documents=[long], max_tokens_per_query=3, max_tokens_per_doc=3)
        assert both < await usage("/rerank", query=long, documents=[long], max_tokens_per_query=3) - 30
        refused = await app.post("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_query": 0})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "max_tokens_per_query")

    serve(scenario, RANK)


def test_scores_that_are_no_probabilities() -> None:
    """Oracle: the logit of the probability of the same pair; the cosine of two vectors has no activation."""

    async def scenario(app: App) -> None:
        for path, body in (
            ("/score", {"queries": "a", "documents": "the quick brown fox"}),
            ("/rerank", {"query": "a", "documents": ["the quick brown fox"]}),
        ):
            found = []
            for activation in (None, True, False):
                reply = (await app.post(path, {**body, "use_activation": activation})).json()
                found.append((reply.get("data") or reply["results"])[0])
            first, second, raw = (one.get("score", one.get("relevance_score")) for one in found)
            assert first == second == pytest.approx(1 / (1 + np.exp(-raw)), abs=1e-6) and raw != first

    serve(scenario, RANK)

    async def cosine(app: App) -> None:
        body = {"queries": "a", "documents": "b"}
        plain = (await app.post("/score", body)).json()["data"]
        assert (await app.post("/score", {**body, "use_activation": False})).json()["data"] == plain

    serve(cosine, EMBED)
