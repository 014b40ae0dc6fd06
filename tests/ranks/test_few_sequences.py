"""Draft tokens beside one or two sequences: they have rows of their own, and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covers import covers
from tests.draft_heads import make_draft_head
from tests.mtp_heads import FAMILIES, make_mtp
from tests.ranks.test_parity import make_prompts
from tests.ranks.test_speculation import VOCABULARY
from tests.tiers import slow_but
from tp_engine import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 8, "max_model_len": 128, "num_gpu_blocks_override": 80,
}  # fmt: skip
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24, "logprobs": 1},
    {"temperature": 0.7, "seed": 3, "max_tokens": 20, "top_p": 0.9},
    {"temperature": 0.0, "max_tokens": 20, "logit_bias": {5: 4.0, 9: 3.5}, "logprobs": 0},
    {"temperature": 0.4, "seed": 1, "max_tokens": 20, "repetition_penalty": 1.1, "n": 2},
]


# A method, or the model with its own head -> the model.
HEADS = {"eagle3": "llama", "qwen3.5": "qwen3.5", "deepseek-v3": "deepseek-v3"}


@pytest.mark.parametrize("method", slow_but(["ngram", "qwen3.5"], ["ngram", "qwen3.5", "deepseek-v3", "eagle3"]))
@pytest.mark.parametrize("max_num_seqs", slow_but([1], [1, 2]))
@pytest.mark.parametrize("world_size", slow_but([1], [1, 2]))
@covers("text drafts", lambda method, world_size: [("qwen3", world_size)] if method == "ngram" else [])
@covers("draft heads", lambda method, world_size: [(HEADS[method], world_size)] if method in HEADS else [])
def test_draft_tokens_are_no_sequences(
    method: str, max_num_seqs: int, world_size: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the engine of as many sequences without draft tokens: tokens, ends and log-probabilities, bit by bit; a
    request has up to three draft tokens in a step, more than sequences."""
    speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
    if method == "ngram":
        model = checkpoint("qwen3", vocab_size=VOCABULARY)
        speculation |= {"method": "ngram", "prompt_lookup_min": 1, "max_step_rows": 8}
    elif method == "eagle3":
        model = checkpoint("llama", vocab_size=VOCABULARY, num_layers=4, tie=False)
        head = make_draft_head(tmp_path / "head", vocab_size=VOCABULARY, state_layers=(0, 1, 2))
        speculation |= {"method": "eagle3", "model": str(head), "max_step_rows": 4}
    else:
        model = make_mtp(tmp_path / method, checkpoint(method, vocab_size=VOCABULARY, **FAMILIES[method]))
    params = [SamplingParams(ignore_eos=True, **one) for one in PARAMS]
    prompts, found = make_prompts(VOCABULARY, len(params)), list[list[Any]]()
    for config in (None, speculation):
        own: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": world_size,
            "speculative_config": config,
        }
        with LLM(str(model), **SMALL, **own) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [one for output in outputs for one in output.outputs]
        found.append([(one.token_ids, one.finish_reason, one.logprobs) for one in answers])
        num_drafted = sum(one.num_draft_tokens for one in answers)
    assert found[0] == found[1] and (num_drafted > 0 or "max_step_rows" not in speculation)
