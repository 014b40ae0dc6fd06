"""Chats in a pool far too small for them say the same with and without a host tier.  Oracle: the tokens, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import torchrun

NUM_CHATS, NUM_TURNS = 16, 4
# The last turn's prompts have about 1,000 tokens in all; the pool holds 160.
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_kv_heads": 4, "vocab_size": 97, "head_dim": 16},
    "gemma3": {"num_kv_heads": 4, "vocab_size": 203, "sliding_window": 12},
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_host_tier_changes_no_token(
    world_size: int, model: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the same chats without a tier, with plans sent ahead and not.  With it, the second and later turns find
    what was said before, although the pool has lost it."""
    folder = checkpoint(model, **MODELS[model])
    pool = TIGHT if model == "qwen3" else {**TIGHT, "num_gpu_blocks_override": 200}  # a block of each of its groups
    options = {
        "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
        "max_model_len": 128, **pool,
    }  # fmt: skip
    settings: list[dict[str, Any]] = [
        {},
        {"kv_offloading_size": 0.05},
        {"kv_offloading_size": 0.05, "async_scheduling": False},
    ]
    cases = [
        {"options": {**options, **one}, "num_chats": NUM_CHATS, "num_turns": NUM_TURNS, "vocab_size": 97}
        for one in settings
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    job = torchrun(
        world_size, ["-m", "tests.ranks.chats_job", str(tmp_path / "cases.json"), str(tmp_path / "out.json")],
        timeout_s=220,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-6000:]
    plain, *tiered = json.loads((tmp_path / "out.json").read_text())
    for found in tiered:
        assert found["tokens"] == plain["tokens"]
        assert found["num_loaded_blocks"] > 100 and found["num_stored_blocks"] > 100
        assert sum(found["cached"][1:]) > 3 * sum(plain["cached"][1:])
        assert found["num_host_hit_tokens"] > 0.5 * sum(found["cached"][1:])
