"""Codecs of the host tier on ranks, under preemption, with and without windows.

Oracle: log-probabilities of the same prescribed tokens without a tier.
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
from tests.ranks.forced_job import run_forced
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_kv_heads": 4, "vocab_size": 203, "head_dim": 16},
    "gemma3": {"num_kv_heads": 4, "vocab_size": 203, "head_dim": 16, "sliding_window": 12},
}
TIER: dict[str, Any] = {"kv_offloading_size": 0.05}
LARGEST_ERROR = {"none": 0.0, "int8": 0.15, "fp8": 0.9, "pca:16:0.9": 0.3, "pca:13:0.5": 2.5}
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48}


def run(world_size: int, folder: Path, pool: dict[str, Any], settings: list[dict[str, Any]], out: Path) -> list[Any]:
    """What ``run_forced`` gives for each of ``settings``."""
    options = {
        "model": str(folder), "tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32",
        "max_model_len": 128, **pool,
    }  # fmt: skip
    sizes = {"num_prompts": 16, "num_rounds": 4, "vocab_size": 97}
    cases = [{"options": {**options, **one}, **sizes} for one in settings]
    paths = (out / f"cases_{world_size}.json", out / f"out_{world_size}.json")
    paths[0].write_text(json.dumps(cases))
    warm_ranks(world_size, parity_job.main, *paths, run_forced)
    found: list[Any] = json.loads(paths[1].read_text())
    return found


def largest_error(found: dict[str, Any], plain: dict[str, Any]) -> float:
    rows = zip(found["logprobs"], plain["logprobs"], strict=True)
    return max(float(np.abs(np.subtract(row, others)).max()) for row, others in rows)


@pytest.mark.parametrize(("world_size", "model"), [(1, "gemma3"), (2, "qwen3")])
@covers("8-bit KV", lambda world_size, model: [(model, world_size)])
def test_errors_are_bounded_under_preemption(
    world_size: int, model: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: no tier, to the bit for the codec none; an error that is not zero and within what was measured, doubled,
    for the others.  All requests end, nothing leaks (``run_forced``), rows are preempted and come back from the host.
    """
    folder = checkpoint(model, **MODELS[model])
    pool = TIGHT if model == "qwen3" else {**TIGHT, "num_gpu_blocks_override": 200}  # a block of each of its groups
    settings = [{}, *({**TIER, "kv_offloading_codec": codec} for codec in LARGEST_ERROR)]
    plain, *tiered = run(world_size, folder, pool, settings, tmp_path)
    for codec, found in zip(LARGEST_ERROR, tiered, strict=True):
        error = largest_error(found, plain)
        assert error <= LARGEST_ERROR[codec] and (error == 0) == (codec == "none"), codec
        assert found["num_loaded_blocks"] > 50 and found["num_preemptions"] > 5
        assert (found["num_refused_blocks"] > 0) == codec.startswith("pca")
        if not codec.startswith("pca"):
            assert found["cached"] == tiered[0]["cached"] and sum(found["cached"]) > 2 * sum(plain["cached"])


def test_one_and_two_ranks_refuse_the_same_blocks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: counts of stores, refusals, loads and cached tokens on one rank; a bound that some blocks miss."""
    settings = [{**TIER, "kv_offloading_codec": "pca:13:0.45", "async_scheduling": False}]
    folder = checkpoint("qwen3", **MODELS["qwen3"])
    (one,), (two,) = (run(world_size, folder, TIGHT, settings, tmp_path) for world_size in (1, 2))
    assert largest_error(one, two) < 1e-3
    for found in (one, two):
        del found["logprobs"]
    assert one == two and one["num_loaded_blocks"] > 20
