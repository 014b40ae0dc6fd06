"""Chats in a pool and a host tier far too small for them say the same with a disk, and again after a restart.

Oracle: the tokens without tiers, bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covers import covers
from tests.ranks import parity_job
from tests.ranks.chats_job import run_chats
from tests.ranks.test_host_tier import MODELS, TIGHT, assert_same_arrivals
from tests.ranks.warm_ranks import warm_ranks
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.model_config import load_model_config
from tp_engine.system.units import GIB

pytestmark = pytest.mark.slow

NUM_HOST_SLOTS = 40


@pytest.mark.parametrize(("world_size", "model"), [(1, "gemma3"), (2, "qwen3"), (2, "deepseek-v3")])
@covers("KV tiers", lambda world_size, model: [(model, world_size)])
def test_a_disk_tier_changes_no_token(
    world_size: int, model: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the same chats without tiers; then, on Qwen3, requests that come at random moments, fork, follow
    grammars, are preempted and aborted.  A second engine on the same directory finds in the first turn what the first
    engine left."""
    folder = checkpoint(model, **MODELS[model])
    is_whole, num_groups = model == "qwen3", len(load_model_config(str(folder), None)[0].kv_layout.groups)
    if is_whole and not (folder / "tokenizer.json").exists():
        byte_level_tokenizer().save_pretrained(folder)
    block_bytes = load_model_config(str(folder), None)[0].kv_layout_on(1).block_bytes(TIGHT["block_size"], 4)
    options = {
        "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
        "max_model_len": 128, **TIGHT, "num_gpu_blocks_override": 40 if num_groups == 1 else 200,
    }  # fmt: skip
    disk = {
        "kv_offloading_size": (NUM_HOST_SLOTS * (1 if num_groups == 1 else 6) + 0.5) * block_bytes / GIB,
        "kv_disk_path": str(tmp_path / "kv"), "kv_disk_size": 0.02,
    }  # fmt: skip
    sizes = {"num_chats": 10, "num_turns": 3, "num_arrivals": 24 * is_whole, "vocab_size": 97}
    cases: list[dict[str, Any]] = [{"options": {**options, **one}, **sizes} for one in ({}, disk, disk)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(world_size, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json", run_chats)
    plain, first, second = json.loads((tmp_path / "out.json").read_text())
    for found in (first, second):
        assert found["tokens"] == plain["tokens"]
        assert found["num_disk_read_blocks"] > 10 and found["num_disk_hit_tokens"] > 40
        assert found["num_disk_failed_blocks"] == 0
        if is_whole:
            assert_same_arrivals(found["arrivals"], plain["arrivals"])
    assert first["num_disk_written_blocks"] > 50  # some blocks are lost before they are written, on a busy machine more
    assert first["cached"][0] == 0 < 40 < second["cached"][0]
