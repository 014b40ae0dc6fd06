"""Embeddings through the official client, and in batch files with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import torch

from tests.e2e.frontend import DEADLINE_S, INFO, RunningServer, running_server
from tests.fake_engine import FakeEngine
from tests.pooling_models import eos_tokenizer, make_embedding_model
from tp_engine import run_batch
from tp_engine.server.config import ServerConfig

STATE = np.array([2.0, ord("h"), ord("i"), 1.0])  # the fake engine's for "hi", one token per byte


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    info = msgspec.structs.replace(INFO, convert="embed", hidden_size=4, dimensions=())
    with running_server(FakeEngine(model_info=info), ServerConfig(port=0, api_key=("sesame",))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame", timeout=DEADLINE_S, max_retries=0) as made:
        yield made


def test_the_client_reads_vectors(client: openai.OpenAI) -> None:
    """Oracle: the fake engine's states; the client asks for base64 by itself, and for floats when told so."""
    answer = client.embeddings.create(model="demo", input=["hi", "hi there"])
    assert answer.data[0].embedding == pytest.approx((STATE / np.linalg.norm(STATE)).tolist(), abs=1e-6)
    assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 2 + 8
    plain = client.embeddings.create(model="demo", input="hi", encoding_format="float", dimensions=2)
    assert plain.data[0].embedding == pytest.approx((STATE[:2] / np.linalg.norm(STATE[:2])).tolist(), abs=1e-6)
    ids = client.embeddings.create(model="demo", input=[list(b"hi")])
    assert ids.data[0].embedding == answer.data[0].embedding


def test_the_client_raises_its_errors(client: openai.OpenAI) -> None:
    """Oracle: the client's exception classes, with our message."""
    with pytest.raises(openai.BadRequestError, match="dimensions is 99; it must be from 1 to 4"):
        client.embeddings.create(model="demo", input="hi", dimensions=99)
    with pytest.raises(openai.BadRequestError, match="served for embeddings"):
        client.completions.create(model="demo", prompt="hi")


def test_batch_lines(tmp_path: Path) -> None:
    """Oracle: transformers for vectors and cosines; a line for text has an error of its own and fails no other."""
    from transformers import AutoModel

    folder = make_embedding_model(tmp_path / "model")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def vector(text: str) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            state = model(torch.tensor([eos_tokenizer().encode(text)])).last_hidden_state[0, -1]
        found: np.ndarray[Any, Any] = torch.nn.functional.normalize(state, dim=0).numpy()
        return found

    texts = ["what is tea", "the quick brown fox", "Tea is a drink."]
    lines = {
        "/v1/embeddings": {"input": texts},
        "/v1/score": {"queries": texts[0], "documents": texts[1:]},
        "/v1/rerank": {"query": texts[0], "documents": texts[1:]},
        "/v1/completions": {"prompt": "hi"},
    }
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}) + "\n"
            for url, body in lines.items()
        )
    )
    run_batch(
        str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model=str(folder), device="cpu", dtype="float32",
        num_gpu_blocks_override=64, max_model_len=128, max_num_seqs=4,
    )  # fmt: skip
    results = {one["custom_id"]: one for one in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    bodies = {url: results[url]["response"]["body"] for url in lines}
    cosines = [float(vector(texts[0]) @ vector(text)) for text in texts[1:]]
    for data, text in zip(bodies["/v1/embeddings"]["data"], texts, strict=True):
        np.testing.assert_allclose(data["embedding"], vector(text), rtol=0, atol=1e-5)
    assert [one["score"] for one in bodies["/v1/score"]["data"]] == pytest.approx(cosines, abs=1e-5)
    ranked = bodies["/v1/rerank"]["results"]
    assert [one["index"] for one in ranked] == sorted((0, 1), key=lambda index: -cosines[index])
    assert ranked[0]["relevance_score"] == pytest.approx(max(cosines), abs=1e-5)
    assert results["/v1/completions"]["response"]["status_code"] == 400
    assert "served for embeddings" in results["/v1/completions"]["error"]["message"]
