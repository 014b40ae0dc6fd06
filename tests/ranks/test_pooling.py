"""Embeddings and scores on 1 and 2 ranks are those of transformers, in float32, whatever else is in the batch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covers import covers
from tests.pooling_models import (
    VOCAB,
    eos_tokenizer,
    make_classifier,
    make_embedding_model,
    make_reranker,
    token_scores,
    yes_no_tokenizer,
)
from tests.ranks import parity_job
from tests.ranks.pooling_job import run_classifier, run_pooling
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow

PAIRS = [
    ("what is tea", "Tea is a drink."),
    ("what is tea", "The fox jumps over the lazy dog, again and again."),
    ("一", "你好世界今天天气很好。"),
    ("what is tea", ""),
]
PLAIN: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 512, "max_num_batched_tokens": 2048}
# Prompts in chunks of 64 tokens; 112 blocks of 4 tokens hold one or two requests, so that others are preempted.
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 112,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    shared = rng.integers(3, VOCAB - 20, 130).tolist()
    own = [rng.integers(3, VOCAB - 20, int(length)).tolist() for length in (1, 9, 40, 250)]
    return [shared + ids if number % 2 else ids for number, ids in enumerate(own)]


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("ranking"))


def last_state(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The oracle: transformers' hidden state (hidden,) of the last token, after the final norm."""
    with torch.inference_mode():
        found: torch.Tensor = _bare_model(folder)(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return found


@cache
def _bare_model(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def expected_vector(folder: Path, token_ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.normalize(last_state(folder, token_ids), dim=0)


def expected_score(folder: Path, query: str, document: str) -> float:
    """The oracle: the program of Qwen3-Reranker's model card, in its three parts."""
    from transformers import AutoModelForCausalLM

    tokenizer, model = yes_no_tokenizer(), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    pair = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (prefix, pair, suffix) for token in tokenizer.encode(part, add_special_tokens=False)]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    return float(torch.nn.functional.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1].exp())


@pytest.mark.parametrize("world_size", [1, 2])
@covers("vectors, scores", lambda world_size: [("qwen3", world_size)])
def test_vectors_and_scores_equal_transformers(
    world_size: int, embedding_model: Path, reranker: Path, tmp_path: Path
) -> None:
    """Oracle: transformers, one prompt at a time; in chunks, preempted, cached, and beside requests for text."""
    common: dict[str, Any] = {
        "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32", "max_model_len": 600,
    }  # fmt: skip
    cases: list[dict[str, Any]] = [
        {"options": {"model": str(folder), **common, **settings}, "prompts": prompts(), "pairs": PAIRS}
        for folder in (embedding_model, reranker)
        for settings in (PLAIN, TIGHT)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(world_size, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json", run_pooling)
    plain, chunked, mixed, tight = json.loads((tmp_path / "out.json").read_text())
    vectors = np.stack([expected_vector(embedding_model, prompt).numpy() for prompt in prompts()])
    encode = eos_tokenizer().encode
    cosines = [
        float(expected_vector(embedding_model, encode(query)) @ expected_vector(embedding_model, encode(document)))
        for query, document in PAIRS
    ]
    for found in (plain, chunked):
        for each in found["vectors"]:
            np.testing.assert_allclose(np.array(each), vectors, rtol=0, atol=1e-5)
        assert found["scores"] == pytest.approx(cosines, abs=1e-5)
        assert found["num_cached"] >= 100
    states = np.stack([last_state(reranker, prompt).numpy() for prompt in prompts()])
    scores = [expected_score(reranker, query, document) for query, document in PAIRS]
    for found in (mixed, tight):
        np.testing.assert_allclose(np.array(found["states"]), states, rtol=0, atol=1e-5 * np.abs(states).max())
        assert found["scores"] == pytest.approx(scores, abs=1e-5)
        assert found["tokens"] == mixed["tokens"] and all(len(tokens) == 40 for tokens in found["tokens"])
    assert tight["num_preemptions"] > 0, "the pool was too large for the case"


@pytest.mark.parametrize("world_size", [2, 4])
@covers("vectors, scores", lambda world_size: [("qwen3", world_size), ("qwen2", world_size)])
def test_scores_of_heads_equal_transformers(world_size: int, tmp_path: Path) -> None:
    """Oracle: transformers, one prompt at a time; last tokens and all tokens in one batch, in chunks, cached."""
    heads = {
        "ForSequenceClassification": ("qwen3", ["classify", "token_classify"]),
        "ForProcessRewardModel": ("qwen2", ["token_classify"]),
    }
    models = {kind: make_classifier(tmp_path / kind, family, kind) for kind, (family, _) in heads.items()}
    cases: list[dict[str, Any]] = [
        {
            "options": {
                "model": str(tmp_path / kind), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
                "max_model_len": 448, **TIGHT,
            },
            "prompts": prompts(),
            "tasks": tasks,
        }
        for kind, (_, tasks) in heads.items()
    ]  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    files = (tmp_path / "cases.json", tmp_path / "out.json")
    warm_ranks(world_size, parity_job.main, *files, run_classifier)
    for model, found in zip(models.values(), json.loads((tmp_path / "out.json").read_text()), strict=True):
        for place, prompt in enumerate(prompts()):
            expected = token_scores(model, prompt)
            for each in found["token_classify"]:
                np.testing.assert_allclose(np.array(each[place]), expected, rtol=0, atol=1e-5)
            for each in found.get("classify", []):
                np.testing.assert_allclose(np.array(each[place]), expected[-1], rtol=0, atol=1e-5)
