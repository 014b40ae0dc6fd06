"""What lower precision costs SmolLM2: bfloat16 beside transformers' own, and the perplexity of each quantised kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.real_model.test_tokens import TEXT
from tp_engine import LLM, SamplingParams

pytestmark = pytest.mark.slow

PART = TEXT[:2000]  # about 440 tokens
# Chunks of 64 tokens, so that most of what a token attends to comes from the KV cache, as it is kept there.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 128,
}
# Perplexity to that of bfloat16 on this part.  Measured: see docs/benchmarks.md.
MOST: dict[str, tuple[dict[str, Any], float]] = {
    "fp8": ({"quantization": "fp8"}, 1.04),
    "int8": ({"quantization": "int8"}, 1.06),
    "int4": ({"quantization": "int4"}, 1.03),
    "fp8 KV cache": ({"kv_cache_dtype": "fp8"}, 1.02),
    "int8 KV cache": ({"kv_cache_dtype": "int8"}, 1.02),
}


@pytest.mark.timeout(900)
def test_bfloat16_is_as_exact_as_transformers(smollm2: Path) -> None:
    """Oracle: transformers in float32; the mean error of log-probabilities is at most 1.1 times that of transformers in
    bfloat16.  Each place has the text's token and the 20 that are likeliest here."""
    import torch
    from transformers import AutoModelForCausalLM

    with LLM(str(smollm2), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
        output = llm.generate([PART], params, use_tqdm=False)[0]
    found = [
        (place, token, entry.logprob)
        for place, entries in enumerate((output.prompt_logprobs or [])[1:])
        for token, entry in (entries or {}).items()
    ]
    places, tokens, ours = map(torch.tensor, zip(*found, strict=True))
    assert len(found) >= 20 * (len(output.prompt_token_ids) - 1)

    def expected(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([output.prompt_token_ids])).logits[0].float()
        return logits.log_softmax(-1)[places, tokens]

    exact = expected(torch.float32)
    own_error, their_error = ((one - exact).abs().mean() for one in (ours, expected(torch.bfloat16)))
    assert own_error <= 1.1 * their_error, (own_error, their_error)


def perplexity(folder: Path, **options: Any) -> float:
    """Return exp of the mean of -log p over all tokens of ``PART`` after the first."""
    with LLM(str(folder), **OPTIONS | options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        output = llm.generate([PART], params, use_tqdm=False)[0]
    places = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    found = [place[token].logprob for token, place in places if place is not None]
    return math.exp(-sum(found) / len(found))


@pytest.mark.timeout(900)
def test_perplexity_of_quantised_kinds(smollm2: Path) -> None:
    """Oracle: the model in bfloat16; limits are a little above what was measured."""
    whole = perplexity(smollm2)
    found = {kind: perplexity(smollm2, **options) / whole for kind, (options, _) in MOST.items()}
    assert all(0.97 < ratio <= MOST[kind][1] for kind, ratio in found.items()), found
