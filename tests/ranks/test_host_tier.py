"""Chats in a pool far too small for them say the same with and without a host tier.  Oracle: the tokens, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covers import covers
from tests.ranks import parity_job
from tests.ranks.chats_job import run_chats
from tests.ranks.warm_ranks import warm_ranks
from tests.text_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.slow

NUM_CHATS, NUM_TURNS, NUM_ARRIVALS = 16, 4, 48
# The last turn's prompts have about 1,000 tokens in all; the pool holds 160.
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_kv_heads": 4, "vocab_size": 384, "head_dim": 16},
    "gemma3": {"num_kv_heads": 4, "vocab_size": 203, "sliding_window": 12},
    "deepseek-v3": {"vocab_size": 203},
}
TIER: dict[str, Any] = {"kv_offloading_size": 0.05}
SLOW_COPIES = "1:move@*:sleep=0.005"
"""All moves of rank 1 take 5 ms longer, which is more than 100 times as long as the copies do."""


@pytest.mark.parametrize(("world_size", "model"), [(1, "gemma3"), (2, "qwen3"), (2, "deepseek-v3")])
@covers("KV tiers", lambda world_size, model: [(model, world_size)])
def test_a_host_tier_changes_no_token(
    world_size: int, model: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the same chats without a tier, with plans sent ahead and not, and on two ranks with slow copies on one of
    them, by which no rank times out.  With the tier, the second and later turns find what was said before, although the
    pool has lost it.  Then, on Qwen3, requests come at random moments, fork, follow grammars, are preempted, aborted.
    """
    folder = checkpoint(model, **MODELS[model])
    is_whole = model == "qwen3"
    if is_whole and not (folder / "tokenizer.json").exists():
        byte_level_tokenizer().save_pretrained(folder)
    pool = {**TIGHT, "num_gpu_blocks_override": 200} if model == "gemma3" else TIGHT  # a block of each of its groups
    options = {
        "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
        "max_model_len": 128, **pool,
    }  # fmt: skip
    settings: list[dict[str, Any]] = [{}, TIER, {**TIER, "async_scheduling": False}]
    sizes = {"num_chats": NUM_CHATS, "num_turns": NUM_TURNS, "num_arrivals": NUM_ARRIVALS * is_whole, "vocab_size": 97}
    cases = [{"options": {**options, **one}, **sizes} for one in settings]
    if world_size == 2:
        cases.append({**cases[1], "fault": SLOW_COPIES})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    paths = (tmp_path / "cases.json", tmp_path / "out.json")
    printed = warm_ranks(world_size, parity_job.main, *paths, run_chats)
    assert ("injected by TP_ENGINE_FAULT: rank 1 in move" in printed) == (world_size == 2)
    plain, *tiered = json.loads((tmp_path / "out.json").read_text())
    for found in tiered:
        assert found["tokens"] == plain["tokens"]
        assert found["num_loaded_blocks"] > 100 and found["num_stored_blocks"] > 100
        assert sum(found["cached"][1:]) > 3 * sum(plain["cached"][1:])
        assert found["num_host_hit_tokens"] > 0.5 * sum(found["cached"][1:])
        if is_whole:
            assert_same_arrivals(found["arrivals"], plain["arrivals"])
            assert found["late_preemptions"] > 5


def assert_same_arrivals(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Equal tokens; where a sequence was aborted, as far as it came.  Some were aborted, and most were not."""
    assert found.keys() == plain.keys()
    for name, one in found.items():
        other, is_cut = plain[name], one["aborted"] or plain[name]["aborted"]
        length = min(len(one["tokens"]), len(other["tokens"])) if is_cut else None
        assert one["tokens"][:length] == other["tokens"][:length], name
    num_aborted = sum(one["aborted"] for one in found.values())
    assert 2 < num_aborted < len(found) / 2
