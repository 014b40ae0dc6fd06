"""Greedy tokens and beams of every architecture at every world size equal those of transformers, in fp32.

One job per world size runs all cases, because starting ranks costs more than running tiny models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covers import covers
from tests.ranks import parity_job
from tests.ranks.parity_job import BEAMS
from tests.ranks.warm_ranks import warm_ranks
from tests.tiers import slow_but

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Every architecture, with odd shapes: KV heads 1, 2, 4 and 8; vocabularies that no world size divides; tied and untied.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 4, "vocab_size": 203, "rope_parameters": LLAMA3_ROPE, "max_shard_size": "60KB"},
    "qwen2": {"num_kv_heads": 2, "vocab_size": 131, "tie": True},
    "qwen3": {"num_kv_heads": 8, "vocab_size": 97, "head_dim": 24, "tie": True},
    "mistral": {"num_kv_heads": 1, "vocab_size": 211, "sliding_window": 20},
}
MODELS_OF_3_RANKS: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48, "vocab_size": 101},
    "qwen3": {"num_heads": 12, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 48, "vocab_size": 103},
}

PLAIN = {"block_size": 16, "num_gpu_blocks_override": 256, "enable_prefix_caching": False}
# 24 tokens a step cut prompts into chunks; 30 blocks of 4 tokens hold two or three requests, so others are preempted.
TIGHT = {
    "block_size": 4,
    "num_gpu_blocks_override": 30,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "enable_prefix_caching": False,
    "enforce_eager": True,  # the other settings record small decodes
}
CACHED = {**TIGHT, "enable_prefix_caching": True, "num_gpu_blocks_override": 48, "enforce_eager": False}


def make_prompts(vocab_size: int, num_prompts: int = 16) -> list[list[int]]:
    """Prompts of 1 to 60 tokens, half of them beginning alike."""
    rng = np.random.default_rng(vocab_size)
    shared = rng.integers(3, vocab_size, 21).tolist()
    lengths = rng.integers(1, 40, num_prompts)
    own = [rng.integers(3, vocab_size, int(length)).tolist() for length in lengths]
    return [shared + ids if i % 2 else ids for i, ids in enumerate(own)]


MAX_TOKENS = [int(n) for n in np.random.default_rng(7).integers(4, 25, 16)]


def models_on(world_size: int) -> dict[str, dict[str, Any]]:
    """The models that so many ranks run, and their shapes."""
    return MODELS_OF_3_RANKS if world_size == 3 else MODELS


@lru_cache
def expected_tokens(folder: Path) -> list[list[int]]:
    """The oracle: transformers' own greedy generation, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt, count in zip(make_prompts(model.config.vocab_size), MAX_TOKENS, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@lru_cache
def expected_beams(folder: Path) -> list[list[tuple[list[int], float]]]:
    """The oracle: (prompt and generated tokens, sum of log-probabilities) of transformers' beam search, best first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in make_prompts(model.config.vocab_size)[:2]:
        ids, width, count = torch.tensor([prompt]), BEAMS["beam_width"], BEAMS["max_tokens"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=width, num_return_sequences=width,
            max_new_tokens=count, length_penalty=0.0, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        answers.append(list(zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True)))
    return answers


def assert_same_beams(found: list[list[Any]], expected: list[list[tuple[list[int], float]]], case: object) -> None:
    """Check for the same sequences in the same order, with sums equal up to rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], case
        assert [total for _, total in ours] == pytest.approx([total for _, total in theirs], abs=5e-3), case


def make_case(folder: Path, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    options = {
        "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
        "max_model_len": 96, **settings,
    }  # fmt: skip
    params = {"temperature": 0.0, "ignore_eos": True}
    return {"options": options, "prompts": make_prompts(vocab_size), "max_tokens": MAX_TOKENS, "params": params}


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 3, 8]))
@covers("tokens", lambda world_size: [(name, world_size) for name in models_on(world_size)])
@covers("preemption", lambda world_size: [(name, world_size) for name in models_on(world_size)])
@covers("prefix cache", lambda world_size: [(name, world_size) for name in models_on(world_size)])
def test_tokens_equal_transformers(world_size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers generate, greedy and with beams.

    Batch of 16 and alone, chunked or not, preempted or not, cached or not.
    """
    folders = {name: checkpoint(name, **shape) for name, shape in models_on(world_size).items()}
    variants = {"plain": PLAIN, "tight": TIGHT, "cached": CACHED}
    if world_size == 8:
        variants = {"cached": CACHED}  # chunked, preempted and cached
    names = [(model, variant) for model in folders for variant in variants]
    cases = [make_case(folders[model], world_size, variants[variant]) for model, variant in names]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(world_size, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())
    for (model, variant), result in zip(names, results, strict=True):
        expected = expected_tokens(folders[model])
        assert [samples[0] for samples in result["batch"]] == expected, (model, variant)
        assert result["alone"][0] == expected[0], (model, variant)
        assert_same_beams(result["beams"], expected_beams(folders[model]), (model, variant))
        assert (result["num_preemptions"] > 0) == (variant != "plain"), (model, variant)
        assert (result["num_cached_tokens"] > 0) == (variant == "cached"), (model, variant)
