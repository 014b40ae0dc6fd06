"""Adapters on 1 and 4 ranks; the 2 KV heads of the model are on two ranks each where there are 4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covers import covers
from tests.lora_adapters import ADAPTERS, greedy_by_peft, make_adapter, needs_peft
from tests.ranks import lora_job
from tests.ranks.warm_ranks import warm_ranks
from tests.tiny_models import make_checkpoint

pytestmark = [needs_peft, pytest.mark.slow]

LENGTHS = (5, 17, 3, 40, 9)
MAX_RANK, MAX_LORAS, HIDDEN, INNER, HEAD_DIM, LAYERS = 16, 3, 64, 96, 8, 2
HEADS, KV_HEADS = 8, 2


@dataclass(frozen=True)
class Case:
    """A checkpoint with its adapters, prompts, and what PEFT answers to each: tokens and log-probabilities."""

    checkpoint: Path
    adapters: list[Path]
    prompts: list[list[int]]
    expected: list[tuple[list[int], list[float]]]
    of_second: list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(folder / "model", "llama", num_kv_heads=KV_HEADS)
    adapters = [
        make_adapter(folder / name, checkpoint, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    ]
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 200, length).tolist() for length in LENGTHS]
    chosen = [*adapters, None]
    expected = [
        greedy_by_peft(checkpoint, adapter, prompt, lora_job.NUM_TOKENS)
        for prompt, adapter in zip(prompts, chosen, strict=True)
    ]
    of_second = [greedy_by_peft(checkpoint, one, prompts[1], lora_job.NUM_TOKENS) for one in adapters[:2]]
    yield Case(checkpoint, adapters, prompts, expected, of_second)


def assert_answer(found: list[Any], expected: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = expected
    assert found[0] == tokens
    np.testing.assert_allclose(found[1], logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 4])
@covers("LoRA", lambda num_ranks: [("llama", num_ranks)])
def test_adapters_of_a_batch(case: Case, num_ranks: int, tmp_path: Path) -> None:
    """Oracle: PEFT's model in float32, prompt by prompt, with more adapters than slots; after a reload in place from
    the same folder the new adapter's answers, though the prefix of the old ones is cached; a torn file is refused and
    changes nothing; the ledger's line is the sizes of A and B by hand."""
    out = tmp_path / "report.json"
    options = {
        "model": str(case.checkpoint),
        "tensor_parallel_size": num_ranks,
        "dtype": "float32",
        "enable_lora": True,
        "max_loras": MAX_LORAS,
        "max_lora_rank": MAX_RANK,
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    warm_ranks(num_ranks, lora_job.run, options, case.prompts, [str(one) for one in case.adapters], str(out))
    report = json.loads(out.read_text(encoding="utf-8"))
    for found, expected in zip(report["answers"], case.expected, strict=True):
        assert_answer(found, expected)
    for found, expected in zip(report["reloaded"], case.of_second, strict=True):
        assert_answer(found, expected)
    assert "is not a whole safetensors file" in report["refusal"]
    assert report["again"] == report["reloaded"][1]
    assert report["adapter_bytes"] == [slot_bytes(num_ranks)] * num_ranks


def slot_bytes(num_ranks: int) -> int:
    """Bytes of all slots of a rank: A and B of queries, keys and values, output, gate and up, down; and their ranks."""
    heads, kv_heads = HEADS // num_ranks * HEAD_DIM, max(1, KV_HEADS // num_ranks) * HEAD_DIM
    inner = INNER // num_ranks
    a = 3 * HIDDEN + heads + 2 * HIDDEN + inner
    b = (heads + 2 * kv_heads) + HIDDEN + 2 * inner + HIDDEN
    return LAYERS * MAX_LORAS * (4 * MAX_RANK * (a + b) + 4 * 4)
