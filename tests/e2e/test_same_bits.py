"""What docs/same_bits.md promises of one rank's engine on C, for models that choose among forms of a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tp_engine import LLM, SamplingParams
from tp_engine.attention import mla
from tp_engine.cpu.library import native_library

pytestmark = pytest.mark.slow

PROMPT_LENGTHS = (30, 5, 14, 3, 40, 11, 25, 12)


def generate(folder: Path, max_num_seqs: int) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of requests that begin and end at different steps; no prompt is cut."""
    options: dict[str, Any] = {
        "max_model_len": 64,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": sum(PROMPT_LENGTHS) + len(PROMPT_LENGTHS),
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,
    }
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 101, length).tolist() for length in PROMPT_LENGTHS]
    lengths = (4 + index % 3 for index in range(len(prompts)))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1) for count in lengths]
    with LLM(str(folder), device="cpu", dtype="float32", **options) as llm:
        samples = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        [(token, own[token].logprob) for token, own in zip(sample.token_ids, sample.logprobs or (), strict=True)]
        for sample in samples
    ]


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
def test_latent_attention(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each request alone, bit by bit, beside two others at a time; prompts on both sides of the length from
    which on they are expanded, and of the number of keys that are chosen."""
    monkeypatch.setattr(mla, "MIN_EXPANDED_QUERIES", 12)
    folder = checkpoint("deepseek-v3.2", num_layers=2, vocab_size=101, index_topk=16, index_n_heads=8)
    assert generate(folder, 3) == generate(folder, 1)
