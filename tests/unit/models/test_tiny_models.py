"""The suite's own helpers: checkpoints for other tests, and the leak check around every test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families import FAMILIES
from tests.leaks import footprint, leaked_since


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_checkpoint_has_the_asked_shape(checkpoint: Callable[..., Path], architecture: str) -> None:
    """Oracle: transformers' own config.json, read back; latent attention has as many key heads as query heads, and
    DeepSeek V4 one."""
    folder = checkpoint(architecture, num_kv_heads=2)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[architecture].model]
    text = config.get("text_config", config)
    own = FAMILIES[architecture].changes.get("num_key_value_heads", 2)
    assert text["num_key_value_heads"] == (text["num_attention_heads"] if "kv_lora_rank" in text else own)
    assert (folder / "model.safetensors").is_file()


def test_checkpoint_is_cached_and_sharded(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same folder for equal parameters; several files if a shard size is given."""
    folder = checkpoint("llama", max_shard_size="50KB")
    assert folder == checkpoint("llama", max_shard_size="50KB")
    assert folder != checkpoint("llama")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def test_leak_check_sees_a_process() -> None:
    """Oracle: a sleeping child is reported with its command, and no longer after it ends."""
    before = footprint()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert [f"process {child.pid}" in line for line in leaked_since(before, grace_s=0.0)] == [True]
        child.kill()
    assert leaked_since(before) == []


def test_leak_check_sees_a_segment() -> None:
    """Oracle: a file in /dev/shm with our prefix, there and removed."""
    before = footprint()
    segment = Path(f"/dev/shm/tp_engine-leak-check-{id(before):x}")
    segment.touch()
    try:
        assert leaked_since(before, grace_s=0.0) == [f"shared memory {segment}"]
    finally:
        segment.unlink()
    assert leaked_since(before) == []
