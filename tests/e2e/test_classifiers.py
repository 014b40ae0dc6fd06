"""Classifiers and reward models on one rank: every kind of head, on several families, is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covers import covers
from tests.pooling_models import eos_tokenizer, make_classifier, token_scores
from tests.tiers import slow_but
from tp_engine import LLM, ConfigError, PoolingParams, RequestError, run_batch

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 96, "block_size": 4, "max_num_batched_tokens": 16,
    "max_num_seqs": 4, "max_model_len": 64,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 50)), [200], list(range(10, 45))]  # the last begins as the second does

HEADS = [
    ("qwen3", "ForSequenceClassification", {"num_labels": 3}),
    ("qwen2", "ForSequenceClassification", {"num_labels": 5, "problem_type": "multi_label_classification"}),
    ("llama", "ForSequenceClassification", {"num_labels": 1}),
    ("mistral", "ForSequenceClassification", {"num_labels": 4, "problem_type": "regression"}),
    ("gemma2", "ForSequenceClassification", {}),
    ("gemma3", "ForSequenceClassification", {"num_labels": 3}),
    ("gemma3-vision", "ForSequenceClassification", {}),
    ("qwen3-moe", "ForSequenceClassification", {}),
    ("qwen3", "ForTokenClassification", {"num_labels": 3}),
    ("qwen2", "ForRewardModel", {}),
    ("qwen2", "ForProcessRewardModel", {}),
]


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    slow_but([one for one in HEADS if one[0] == "qwen3" or one[1] == "ForProcessRewardModel"], HEADS),
    ids=[f"{one[0]}-{one[1]}" for one in HEADS],
)
@covers("vectors, scores", lambda family: [(family, 1)])
def test_scores_equal_transformers(family: str, kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: transformers' scores of each token, in float32; its softmax, sigmoid or neither, by ``problem_type``.

    Prompts run in chunks of 16 tokens, twice, so that prefixes are cached.
    """
    model = make_classifier(tmp_path, family, kind, **settings)
    scores = [torch.tensor(token_scores(model, prompt)) for prompt in PROMPTS]
    per_token = kind in ("ForTokenClassification", "ForProcessRewardModel")
    num_labels, problem = scores[0].shape[1], settings.get("problem_type")
    activation: torch.nn.Module = torch.nn.Softmax(dim=-1) if num_labels > 1 else torch.nn.Sigmoid()
    if problem == "multi_label_classification":
        activation = torch.nn.Sigmoid()
    if problem == "regression" or kind == "ForRewardModel":
        activation = torch.nn.Identity()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        plain = PoolingParams(use_activation=False)
        for _ in range(2):
            if not per_token:
                for params, act in ((plain, torch.nn.Identity()), (None, activation)):
                    outputs = llm.classify(PROMPTS, params, use_tqdm=False)
                    for output, expected in zip(outputs, scores, strict=True):
                        assert output.outputs.probs == pytest.approx(act(expected[-1]).tolist(), abs=1e-5)
                        assert output.outputs.num_classes == num_labels
            every = llm.encode(PROMPTS, plain, pooling_task="token_classify", use_tqdm=False)
            rewards = llm.reward(PROMPTS, use_tqdm=False)
            for found, reward, expected in zip(every, rewards, scores, strict=True):
                np.testing.assert_allclose(found.outputs.data, expected, rtol=0, atol=1e-5)
                as_reward = torch.nn.Identity() if num_labels == 1 else activation
                pooled = as_reward(expected if per_token else expected[-1])
                np.testing.assert_allclose(reward.outputs.data, pooled, rtol=0, atol=1e-5)
        assert max(output.num_cached_tokens for output in llm.reward(PROMPTS, use_tqdm=False)) == (
            0 if per_token else 36
        )
        llm.engine.check_integrity()
        with pytest.raises(RequestError, match=r"served for scores and generates no text; .* /classify"):
            llm.generate(PROMPTS[:1], use_tqdm=False)
        with pytest.raises(RequestError, match="--convert embed"):
            llm.embed(PROMPTS[:1], use_tqdm=False)
        with pytest.raises(RequestError, match="scores have a number for each label"):
            llm.encode(PROMPTS[:1], PoolingParams(dimensions=2), use_tqdm=False)
        with pytest.raises(RequestError, match=r"task is 'token_embed'; this model has .*token_classify"):
            llm.encode(PROMPTS[:1], pooling_task="token_embed", use_tqdm=False)


@pytest.fixture(scope="module")
def one_label(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A classifier with one label, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("one-label")
    return folder, make_classifier(folder, "llama", num_labels=1)


def test_batch_lines(one_label: tuple[Path, Any], tmp_path: Path) -> None:
    """Oracle: transformers' score of each text, or pair, and its sigmoid; lines that the model cannot answer have
    errors of their own and fail no other."""
    folder, model = one_label
    encode = eos_tokenizer().encode

    def probability(*texts: str) -> float:
        return float(1 / (1 + np.exp(-token_scores(model, encode(*texts))[-1, 0])))

    lines = {
        "/v1/classify": {"input": ["hi", "what is tea"]},
        "/v1/pooling": {"input": "hi", "task": "token_classify", "use_activation": False},
        "/v1/score": {"queries": "tea", "documents": ["a drink", "fox"]},
        "/v1/rerank": {"query": "tea", "documents": ["a drink", "fox"]},
        "/v1/embeddings": {"input": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}) + "\n"
            for url, body in lines.items()
        )
    )
    run_batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), model=str(folder), **OPTIONS)
    results = {one["custom_id"]: one for one in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    bodies = {url: results[url]["response"]["body"] for url in lines}
    probs = [one["probs"][0] for one in bodies["/v1/classify"]["data"]]
    assert probs == pytest.approx([probability("hi"), probability("what is tea")], abs=1e-5)
    (pooled,) = bodies["/v1/pooling"]["data"]
    np.testing.assert_allclose(pooled["data"], token_scores(model, encode("hi")), rtol=0, atol=1e-5)
    pairs = [probability("tea", "a drink"), probability("tea", "fox")]
    assert [one["score"] for one in bodies["/v1/score"]["data"]] == pytest.approx(pairs, abs=1e-5)
    ranked = bodies["/v1/rerank"]["results"]
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(pairs, reverse=True), abs=1e-5)
    for url, words in (("/v1/embeddings", "--convert embed"), ("/v1/chat/completions", "served for scores")):
        assert results[url]["response"]["status_code"] == 400 and words in results[url]["error"]["message"]


def test_new_weights_and_broken_ones(one_label: tuple[Path, Any]) -> None:
    """Oracle: a head twice as large gives twice the score; one with NaN an error; the old one again the old score."""
    from safetensors.torch import load_file

    folder, model = one_label
    tensors = load_file(folder / "model.safetensors")
    score = token_scores(model, PROMPTS[0])[-1]
    with LLM(str(folder), **OPTIONS) as llm:
        for factor in (1.0, 2.0, float("nan"), 1.0):
            llm.update_weights([*{**tensors, "score.weight": tensors["score.weight"] * factor}.items()])
            if np.isnan(factor):
                with pytest.raises(RuntimeError, match=r"not numbers.*--dtype"):
                    llm.reward(PROMPTS[:1], use_tqdm=False)
            else:
                (found,) = llm.reward(PROMPTS[:1], use_tqdm=False)
                np.testing.assert_allclose(found.outputs.data, factor * score, rtol=0, atol=1e-5)
        llm.engine.check_integrity()


def test_what_else_a_classifier_is_served_for(one_label: tuple[Path, Any]) -> None:
    """Oracle: transformers' hidden state as an embedding; adapters are refused."""
    folder, model = one_label
    with torch.inference_mode():
        state = model.model(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
    with LLM(str(folder), convert="embed", **OPTIONS) as llm:
        (found,) = llm.embed(PROMPTS[:1], use_tqdm=False)
    expected = torch.nn.functional.normalize(state, dim=0).numpy()
    np.testing.assert_allclose(found.outputs.embedding, expected, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="adapters are served for text only"):
        LLM(str(folder), enable_lora=True, **OPTIONS)
