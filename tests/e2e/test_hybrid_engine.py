"""Engines whose model has recurrent states: forks, beams and preemptions.  Oracle: transformers, and lone requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [np.random.default_rng(length).integers(3, 203, length).tolist() for length in (40, 17, 64, 5)]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3.5", dtype="float32", max_position=2048)


@pytest.mark.parametrize("num_blocks", [400, 40])
def test_forks_are_lone_requests(folder: Path, num_blocks: int) -> None:
    """Oracle: each of the n samples, asked for alone with its seed; few blocks preempt some."""
    options: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 120,
        "block_size": 4,
        "num_gpu_blocks_override": num_blocks,
    }
    with LLM(str(folder), max_num_seqs=9, max_num_batched_tokens=48, **options) as llm:
        params = SamplingParams(temperature=0.9, n=3, seed=7, max_tokens=12, ignore_eos=True)
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        assert (llm.engine.stats().num_preemptions > 0) == (num_blocks == 40)
        for index in range(3):
            lone = SamplingParams(temperature=0.9, seed=7 + index, max_tokens=12, ignore_eos=True)
            for output, alone in zip(together, llm.generate(PROMPTS, lone, use_tqdm=False), strict=True):
                assert output.outputs[index].token_ids == alone.outputs[0].token_ids
        llm.engine.check_integrity()


def test_beams_score_as_transformers_does(folder: Path) -> None:
    """Oracle: transformers' log-probabilities of each beam's tokens."""
    import transformers

    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(str(folder), device="cpu", max_model_len=120, num_gpu_blocks_override=400, block_size=4) as llm:
        found = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    for prompt, output in zip(PROMPTS, found, strict=False):
        for beam in output.sequences:
            generated = beam.tokens[-5:]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(5), generated].sum().item()
            assert beam.cum_logprob == pytest.approx(expected, abs=1e-3)


def test_identical_prompts_and_a_shared_prefix_are_cached(folder: Path) -> None:
    """Oracle: an engine without a prefix cache, and the share of an identical prompt of 1,000 tokens: at least 90 %."""
    rng = np.random.default_rng(3)
    long = rng.integers(3, 203, 1000).tolist()
    prompts = [long[:300] + rng.integers(3, 203, 20).tolist() for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = {}
    for caching in (True, False):
        options: dict[str, Any] = {
            "enable_prefix_caching": caching,
            "num_gpu_blocks_override": 300,
            "max_model_len": 1100,
        }
        with LLM(str(folder), device="cpu", max_num_seqs=16, **options) as llm:
            alone = [llm.generate([long], params, use_tqdm=False)[0] for _ in range(2)]
            together = llm.generate(prompts, params, use_tqdm=False)
            found[caching] = [output.outputs[0].token_ids for output in (*alone, *together)]
            llm.engine.check_integrity()
        assert alone[1].num_cached_tokens == (992 if caching else 0)
        if caching:
            # The first one finds where it parts from the long prompt; the others wait for its snapshot.
            assert [output.num_cached_tokens for output in together] == [0] + [288] * 11
    assert found[True] == found[False]
