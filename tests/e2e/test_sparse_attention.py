"""A passkey among 20,000 tokens, for a model whose weights are made so that its indexer finds it (DeepSeek-V3.2).

One layer.  A token is a question, a passkey, its answer or noise; the hidden state has an element for each of these,
and five for what a token says: one of the passkeys, or what all noise says.  Index keys of passkeys match the
question's index queries, those of noise score 0.  The attention of a question prefers a passkey to noise, but not to
20,000 tokens of it: without a choice, or with a wrong one, the answer is what noise says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tp_engine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION, ANSWERS, KEYS, NOISE = 3, 4, 8, 12  # the first ids of each kind
NUM_TOKENS, NUM_CACHED, TOP_K = 20_000, 19_500, 16
IS_QUESTION, IS_KEY, IS_ANSWER, SAYS = 0, 1, 2, 3  # elements of the hidden state


def make_passkey_model(folder: Path, source: Path) -> Path:
    """Write the model of the module's text into ``folder``; ``source`` is a model of its sizes."""
    folder.mkdir()
    text = (source / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")
    config = json.loads(text)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    attention = {name.split("self_attn.")[-1].removesuffix(".weight"): one for name, one in tensors.items()}
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[QUESTION, IS_QUESTION] = embedding[ANSWERS:KEYS, IS_ANSWER] = embedding[KEYS:NOISE, IS_KEY] = 1.0
    embedding[KEYS:NOISE, SAYS : SAYS + 4] = torch.eye(4)
    embedding[NOISE:, SAYS + 4] = 1.0
    embedding[NOISE:, SAYS + 5 :] = torch.nn.functional.normalize(torch.randn(embedding[NOISE:, SAYS + 5 :].shape))
    head[QUESTION, IS_ANSWER] = 20.0  # a question follows each answer
    head[ANSWERS:KEYS, SAYS : SAYS + 4] = torch.eye(4)
    head[NOISE, SAYS + 4] = 1.0
    dim, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    attention["q_a_proj"][0, IS_QUESTION] = 1.0
    attention["indexer.wq_b"][rope::dim, 0] = 1.0  # the first element that does not turn
    attention["indexer.wk"][rope, IS_KEY] = 1.0
    attention["indexer.weights_proj"][:, IS_QUESTION] = 1.0
    nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
    attention["q_b_proj"][:: nope + rope, 0] = 1.75  # scores of passkeys are 7
    attention["kv_a_proj_with_mqa"][0, IS_KEY] = 1.0
    attention["kv_a_proj_with_mqa"][1:6, SAYS : SAYS + 5] = torch.eye(5)
    attention["kv_b_proj"][:: nope + values, 0] = 1.0
    for head_index in range(config["num_attention_heads"]):
        first = head_index * (nope + values) + nope
        attention["kv_b_proj"][first : first + 5, 1:6] = torch.eye(5)
        own = slice(head_index * values, head_index * values + 5)
        attention["o_proj"][SAYS : SAYS + 5, own] = torch.eye(5) / config["num_attention_heads"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def passkey_model(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``passkey_model(index_topk=...)`` -> folder."""

    def make(**settings: Any) -> Path:
        sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 64, "max_position": NUM_TOKENS + 100}
        return make_passkey_model(tmp_path / "model", checkpoint("deepseek-v3.2", index_n_heads=8, **sizes, **settings))

    return make


def noise_with(key: int, place: int, length: int) -> list[int]:
    """Noise, the passkey ``key`` at ``place``, the question last."""
    tokens = np.random.default_rng(length).integers(NOISE, 64, length)
    tokens[place], tokens[-1] = KEYS + key, QUESTION
    found: list[int] = tokens.tolist()
    return found


@pytest.mark.parametrize(("backend", "place"), [("native", 777), ("torch", 19_000)])
def test_a_passkey_is_found_among_20000_tokens(backend: str, place: int, passkey_model: Callable[..., Path]) -> None:
    """Oracle: the passkey, asked for by the prompt and by each second decode; then behind another end of the prompt,
    whose first 19,500 tokens are in the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "attention_backend": backend, "max_model_len": NUM_TOKENS + 50}
    prompt = noise_with(2, place, NUM_TOKENS)
    other = [*prompt[:NUM_CACHED], *noise_with(1, 100, 400)[200:]]
    with LLM(str(passkey_model(index_topk=TOP_K)), max_num_batched_tokens=1024, **options) as llm:
        for tokens, num_cached in ((prompt, 0), (other, NUM_CACHED - 16)):
            (answer,) = llm.generate([tokens], params, use_tqdm=False)
            assert answer.outputs[0].token_ids == [ANSWERS + 2, QUESTION] * 3
            assert answer.num_cached_tokens >= num_cached
        llm.engine.check_integrity()


def test_without_a_choice_noise_is_louder(passkey_model: Callable[..., Path]) -> None:
    """Oracle: the softmax: among 2,000 tokens a passkey weighs 35 %, so the tests above do depend on the choice."""
    with LLM(str(passkey_model(index_topk=2048)), device="cpu", max_model_len=2048) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (answer,) = llm.generate([noise_with(2, 777, 2000)], params, use_tqdm=False)
    assert answer.outputs[0].token_ids == [NOISE]
