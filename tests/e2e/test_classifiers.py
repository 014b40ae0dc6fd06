"""Classifiers and reward models on one rank: every kind of head, on several families, is that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pooling_models import make_classifier, token_scores
from tp_engine import LLM, PoolingParams, RequestError

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


@pytest.mark.parametrize(("family", "kind", "settings"), HEADS, ids=[f"{one[0]}-{one[1]}" for one in HEADS])
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
