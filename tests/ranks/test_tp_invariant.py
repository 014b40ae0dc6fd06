"""With ``tp_invariant``, tokens and log-probabilities are the same bits on 1, 2, 4 and 8 ranks, in every setting.

One job per number of ranks runs all cases, because starting ranks costs more than running tiny models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import parity_job
from tests.ranks.warm_ranks import warm_ranks

VOCAB_SIZE, MAX_MODEL_LEN = 203, 96
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160},
    "qwen3": {"num_kv_heads": 2, "intermediate_size": 1040, "attention_bias": True, "tie": True},
    "gemma3": {"num_layers": 2, "num_kv_heads": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32},
}
AMPLE = {"num_gpu_blocks_override": 200}
TIGHT = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 30}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {**AMPLE, "enable_prefix_caching": False},
    "tight": {**TIGHT, "enable_prefix_caching": False},  # chunks, and preemption
    "cached": {**TIGHT, "num_gpu_blocks_override": 60, "max_num_seqs": 2, "enforce_eager": True},
}
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("sampled", {"temperature": 0.9, "top_p": 0.8, "seed": 7}),
)


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 60 tokens, half of them beginning alike."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB_SIZE, 21).tolist()
    own = [rng.integers(3, VOCAB_SIZE, int(length)).tolist() for length in rng.integers(1, 40, 8)]
    return [shared + ids if i % 2 else ids for i, ids in enumerate(own)]


def make_cases(folders: dict[str, Path], world_size: int) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Every model in every setting; greedy and sampled, float32 and bfloat16 in turns: each model has both of each."""
    cases = {}
    for index, (name, folder) in enumerate(folders.items()):
        for number, (setting, options) in enumerate(SETTINGS.items()):
            way, params = WAYS[(index + number) % 2]
            dtype = ("bfloat16", "float32")[(index // 2 + number) % 2]
            cases[name, setting, way, dtype] = {
                "options": {
                    "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": dtype,
                    "max_model_len": MAX_MODEL_LEN, "tp_invariant": True, **options,
                },
                "prompts": make_prompts(),
                "max_tokens": [9, 14, 6, 11, 8, 12, 10, 7],
                "params": {**params, "ignore_eos": True, "logprobs": 1},
                "is_batch_only": True,
            }  # fmt: skip
    return cases


@pytest.mark.timeout(300)
def test_the_same_bits_on_any_number_of_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: one rank.  Token ids and log-probabilities of 2, 4 and 8 ranks are equal to its bits."""
    folders = {name: checkpoint(name, vocab_size=VOCAB_SIZE, **shape) for name, shape in MODELS.items()}
    found: dict[int, list[dict[str, Any]]] = {}
    for world_size in (1, 2, 4, 8):
        cases = make_cases(folders, world_size)
        (tmp_path / "cases.json").write_text(json.dumps(list(cases.values())))
        warm_ranks(world_size, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json", timeout_s=200)
        found[world_size] = json.loads((tmp_path / "out.json").read_text())
    for world_size in (2, 4, 8):
        for case, expected, result in zip(cases, found[1], found[world_size], strict=True):
            assert result["tokens"] == expected["tokens"], (case, world_size)
            assert result["logprobs"] == expected["logprobs"], (case, world_size)
            assert (result["num_preemptions"] > 0) == (case[1] == "tight"), (case, world_size)
            assert (result["num_cached_tokens"] > 0) == (case[1] == "cached"), (case, world_size)
