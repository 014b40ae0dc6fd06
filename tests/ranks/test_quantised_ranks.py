"""A quantised KV cache is quantised head by head, so the number of ranks changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.covers import covers
from tp_engine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

PROMPTS = [[5, 9, 13, 7] * 5, [100, 3, 50], list(range(20, 80))]


def generated(folder: Path, kv_cache_dtype: str, num_ranks: int) -> list[list[int]]:
    """Greedy tokens; prompts take several chunks."""
    with LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=num_ranks,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=64,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@covers("8-bit KV", lambda: [("qwen3", 1), ("qwen3", 2)])
def test_two_ranks_give_the_tokens_of_one(checkpoint: Callable[..., Path], kv_cache_dtype: str) -> None:
    """Oracle: one rank."""
    folder = checkpoint("qwen3", vocab_size=203)
    assert generated(folder, kv_cache_dtype, 2) == generated(folder, kv_cache_dtype, 1)
