"""Log-probabilities of prompts are the same for any number of ranks; each rank holds a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from tp_engine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

PROMPTS = [list(range(20, 110)), [100, 3, 50], [7] * 41]


def scored(folder: Path, num_ranks: int) -> list[list[dict[int, tuple[float, int | None]]]]:
    """For each prompt and position: id -> (log-probability, rank) of the token and of the likeliest tokens."""
    with LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=num_ranks,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=64,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
        found = [output.prompt_logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        [{token: (entry.logprob, entry.rank) for token, entry in place.items()} for place in places or [] if place]
        for places in found
    ]


def test_two_ranks_score_prompts_as_one(checkpoint: Callable[..., Path]) -> None:
    """Oracle: one rank; steps of 64 tokens are scored 16 positions at a time, gathered from both ranks."""
    folder = checkpoint("qwen3", vocab_size=203)
    alone, together = scored(folder, 1), scored(folder, 2)
    assert [len(places) for places in together] == [len(prompt) - 1 for prompt in PROMPTS]
    for expected, found in zip(chain(*alone), chain(*together), strict=True):
        assert found.keys() == expected.keys()
        for token, (value, rank) in found.items():
            assert value == pytest.approx(expected[token][0], abs=1e-3) and rank == expected[token][1]
