"""A KV cache of another type than the model's, end to end on one rank: its error, and what must stay exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_engine import LLM, ConfigError, SamplingParams
from tp_engine.requests.outputs import RequestOutput

pytestmark = pytest.mark.slow

VOCAB = 203
PROMPT = torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
# Largest error of a prompt token's log-probability: twice the measured errors (0.035, 0.353, 0.013; log-probabilities
# spread over several nats).  An fp8 value keeps 3 bits of mantissa, an int8 value 7 bits of the head's largest.
LARGEST_ERROR = {"int8": 0.07, "fp8": 0.7, "bfloat16": 0.026}
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
}


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module", params=list(LARGEST_ERROR))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(folder: Path, kind: str) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_dtype=kind, **OPTIONS) as engine:
        yield engine
        engine.engine.check_integrity()
        assert engine.engine.stats().num_used_blocks == 0


def scores(llm: LLM) -> torch.Tensor:
    """Log-probabilities (89,) of the prompt's tokens; chunks of 24 tokens read what earlier ones stored."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = llm.generate([PROMPT], params, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    pairs = zip(found[1:], PROMPT[1:], strict=True)
    return torch.tensor([place[token].logprob for place, token in pairs if place is not None])


def test_error_is_bounded(llm: LLM, folder: Path, kind: str) -> None:
    """Oracle: the same engine with a float32 cache; the error is within the bound, and not 0."""
    with LLM(str(folder), device="cpu", dtype="float32", **OPTIONS) as exact:
        expected = scores(exact)
    error = float((scores(llm) - expected).abs().max())
    assert expected.std() > 0.5
    assert 0 < error <= LARGEST_ERROR[kind]


def test_equals_pytorch_s_attention(llm: LLM, folder: Path, kind: str) -> None:
    """Oracle: the same engine with the torch backend: tokens, and log-probabilities."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = OPTIONS | {"dtype": "float32", "kv_cache_dtype": kind, "attention_backend": "torch"}
    with LLM(str(folder), device="cpu", **options) as plain:
        expected, tokens = scores(plain), generate(plain, greedy).outputs[0].token_ids
    torch.testing.assert_close(scores(llm), expected, rtol=0, atol=1e-4)
    assert generate(llm, greedy).outputs[0].token_ids == tokens


def test_forks_and_cached_prefixes_change_nothing(llm: LLM) -> None:
    """Oracle: the prompt run alone.  Forks copy a partial block and its scales; the second run hits a cached prefix."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = generate(llm, greedy)
    assert [output.token_ids for output in generate(llm, greedy).outputs] == [alone.outputs[0].token_ids]
    forks = generate(llm, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=3))
    assert [output.token_ids for output in forks.outputs] == 3 * [alone.outputs[0].token_ids]


def generate(llm: LLM, params: SamplingParams) -> RequestOutput:
    output: RequestOutput = llm.generate([PROMPT], params, use_tqdm=False)[0]
    return output


def test_backend_that_can_not_is_refused(folder: Path) -> None:
    """Oracle: the message has the rule and the remedy, before anything starts."""
    options = OPTIONS | {"dtype": "float32", "kv_cache_dtype": "int8", "attention_backend": "flash_attn"}
    with pytest.raises(ConfigError, match=r"attention_backend is flash_attn: .*use"):
        LLM(str(folder), device="cpu", **options)
