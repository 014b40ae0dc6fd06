"""With ``tp_invariant``, tokens and log-probabilities are the same bits on 1, 2, 4 and 8 ranks and in every setting.

One job per number of ranks runs all cases, because starting ranks costs more than running tiny models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covers import covers
from tests.ranks import parity_job
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow

VOCAB_SIZE, MAX_MODEL_LEN = 203, 96
# name -> shape, type, whether sampled
MODELS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "llama": ({"intermediate_size": 160}, "bfloat16", False),
    "qwen3": (
        {"num_kv_heads": 2, "intermediate_size": 1040, "attention_bias": True, "tie": True},
        "float32",
        True,
    ),
    "gemma3": (
        {"num_layers": 2, "num_kv_heads": 1, "layer_types": ["sliding_attention", "full_attention"]},
        "bfloat16",
        True,
    ),
    "qwen2-moe": ({"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}, "float32", False),
}
AMPLE = {"num_gpu_blocks_override": 200}
TIGHT = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 45}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {**AMPLE, "enable_prefix_caching": False},
    "tight": {**TIGHT, "enable_prefix_caching": False},  # chunks, and preemption
    "cached": {**TIGHT, "num_gpu_blocks_override": 80, "max_num_seqs": 2, "enforce_eager": True},
}
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "seed": 7}


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 60 tokens, half of them beginning alike."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB_SIZE, 21).tolist()
    own = [rng.integers(3, VOCAB_SIZE, int(length)).tolist() for length in rng.integers(1, 40, 8)]
    return [shared + ids if i % 2 else ids for i, ids in enumerate(own)]


def make_cases(
    folders: dict[str, Path],
    world_size: int,
    settings: dict[str, dict[str, Any]] = SETTINGS,
    *,
    tp_invariant: bool = True,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Every model in every setting."""
    cases = {}
    for name, folder in folders.items():
        _, dtype, is_sampled = MODELS[name]
        for setting, options in settings.items():
            cases[name, setting] = {
                "options": {
                    "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": dtype,
                    "max_model_len": MAX_MODEL_LEN, "tp_invariant": tp_invariant, **options,
                },
                "prompts": make_prompts(),
                "max_tokens": [9, 14, 6, 11, 8, 12, 10, 7],
                "params": {**(SAMPLED if is_sampled else GREEDY), "ignore_eos": True, "logprobs": 1},
                "is_batch_only": True,
            }  # fmt: skip
    return cases


def run(cases: dict[tuple[str, str], dict[str, Any]], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """The results of all cases, by one job."""
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    warm_ranks(world_size, parity_job.main, folder / "cases.json", folder / "out.json")
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


@covers("tp-invariant", lambda: [(name, ranks) for name in MODELS for ranks in (1, 2, 4, 8)])
def test_the_same_bits_on_any_number_of_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: one rank, whole prompts.  Token ids and log-probabilities of 2, 4 and 8 ranks, of chunks, after
    preemption, from the prefix cache and of steps that are not recorded are equal to its bits."""
    folders = {name: checkpoint(name, vocab_size=VOCAB_SIZE, **shape) for name, (shape, *_) in MODELS.items()}
    expected: dict[str, dict[str, Any]] = {}
    for world_size in (1, 2, 4, 8):
        settings = SETTINGS if world_size < 4 else {"tight": SETTINGS["tight"]}
        cases = make_cases(folders, world_size, settings)
        for (name, setting), result in zip(cases, run(cases, world_size, tmp_path), strict=True):
            case, own = (name, setting, world_size), expected.setdefault(name, result)
            assert result["tokens"] == own["tokens"], case
            assert result["logprobs"] == own["logprobs"], case
            assert (result["num_preemptions"] > 0) == (setting == "tight"), case
            assert (result["num_cached_tokens"] > 0) == (setting == "cached"), case


def test_the_same_bits_in_any_batch_without_the_option(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: each request alone, its prompt whole.  Token ids and log-probabilities in a batch, of chunks, after
    preemption, from the prefix cache and of steps that are not recorded are equal to its bits, on one rank and on two.

    In float32, because oneDNN has products of bfloat16 on some processors.
    """
    shapes = {name: shape for name, (shape, dtype, _) in MODELS.items() if dtype == "float32"}
    folders = {name: checkpoint(name, vocab_size=VOCAB_SIZE, **shape) for name, shape in shapes.items()}
    settings = {"alone": {**AMPLE, "max_num_seqs": 1, "enable_prefix_caching": False}, **SETTINGS}
    for world_size in (1, 2):
        cases = make_cases(folders, world_size, settings, tp_invariant=False)
        expected: dict[str, dict[str, Any]] = {}
        for (name, setting), result in zip(cases, run(cases, world_size, tmp_path), strict=True):
            own = expected.setdefault(name, result)
            assert result["tokens"] == own["tokens"], (name, setting, world_size)
            assert result["logprobs"] == own["logprobs"], (name, setting, world_size)
