"""Adapters of routed experts on 1 and 2 ranks, which have parts of each expert, or some experts whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covers import covers
from tests.lora_adapters import EXPERT_ADAPTERS, greedy_by_peft, make_adapter, needs_peft
from tests.ranks import lora_job
from tests.ranks.warm_ranks import warm_ranks
from tests.tiny_models import make_checkpoint

pytestmark = [needs_peft, pytest.mark.slow]

LENGTHS = (5, 17, 40, 9)
MAX_RANK, MAX_LORAS, HIDDEN = 16, 2, 64


@pytest.mark.parametrize(
    ("family", "num_ranks", "changes"),
    [
        ("qwen3-moe", 1, {}),
        ("qwen3-moe", 2, {}),
        ("qwen3-moe", 2, {"enable_expert_parallel": True}),
        ("mixtral", 2, {}),
    ],
)
@covers("LoRA", lambda family, num_ranks: [(family, num_ranks)])
def test_adapters_of_experts(family: str, num_ranks: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: PEFT's model in float32, prompt by prompt, for adapters of both stacks, of either, and the base model in
    one batch, with more adapters than slots, and after a reload in place; the ledger's line grows by the sizes of A
    and B of the experts, by hand."""
    checkpoint = make_checkpoint(tmp_path / "model", family)
    adapters = [
        make_adapter(tmp_path / name, checkpoint, seed=seed, **config)
        for seed, (name, config) in enumerate(EXPERT_ADAPTERS.items())
    ]
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 200, length).tolist() for length in LENGTHS]
    out = tmp_path / "report.json"
    options = {
        "model": str(checkpoint),
        "tensor_parallel_size": num_ranks,
        "dtype": "float32",
        "enable_lora": True,
        "lora_experts": True,
        "max_loras": MAX_LORAS,
        "max_lora_rank": MAX_RANK,
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        **changes,
    }
    warm_ranks(num_ranks, lora_job.run, options, prompts, [str(one) for one in adapters], str(out))
    report = json.loads(out.read_text(encoding="utf-8"))
    for found, prompt, adapter in zip(report["answers"], prompts, [*adapters, None], strict=True):
        assert_answer(found, greedy_by_peft(checkpoint, adapter, prompt, lora_job.NUM_TOKENS))
    for found, adapter in zip(report["reloaded"], adapters[:2], strict=True):
        assert_answer(found, greedy_by_peft(checkpoint, adapter, prompts[1], lora_job.NUM_TOKENS))
    assert report["again"] == report["reloaded"][1]
    assert report["adapter_bytes"] == [slot_bytes(family, num_ranks, bool(changes))] * num_ranks


def assert_answer(found: list[Any], expected: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = expected
    assert found[0] == tokens
    np.testing.assert_allclose(found[1], logprobs, rtol=0, atol=1e-4)


def slot_bytes(family: str, num_ranks: int, is_whole: bool) -> int:
    """Bytes of all slots of a rank: queries, keys and values, output; gate and up, down of the dense layer that one of
    the families has; gate and up, down of each expert; and the ranks of all."""
    layers, num_dense, experts, inner = (3, 1, 8, 40) if family == "qwen3-moe" else (2, 0, 4, 96)
    heads, kv_heads, dense = 64 // num_ranks, 32 // num_ranks, 96 // num_ranks
    local_experts = experts // num_ranks if is_whole else experts
    room = inner if is_whole else (inner // num_ranks + 7) // 8 * 8
    attention = (3 * HIDDEN + heads) + (heads + 2 * kv_heads + HIDDEN)
    mlp = (2 * HIDDEN + dense) + (2 * dense + HIDDEN)
    expert = (HIDDEN + room) + (2 * room + HIDDEN)
    sizes = layers * attention + num_dense * mlp + (layers - num_dense) * local_experts * expert
    num_ranks_held = 2 * layers + 2 * num_dense + 2 * (layers - num_dense) * local_experts
    return MAX_LORAS * 4 * (MAX_RANK * sizes + num_ranks_held)
