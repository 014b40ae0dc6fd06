"""YaRN by ``hf_overrides``: a context four times as long as config.json's, on one rank and on two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.launch import TWO_RANKS
from tp_engine import LLM, SamplingParams
from tp_engine.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

OPTIONS: dict[str, Any] = {**TWO_RANKS, "num_gpu_blocks_override": 64, "block_size": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
PROMPT = [3 + (7 * index) % 190 for index in range(180)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_yarn_equals_transformers(
    tensor_parallel_size: int, checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: transformers with the same rotation in its configuration; tokens, and log-probabilities to 1e-4.

    The log names the change.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint("qwen3", max_position=64)
    options = {**OPTIONS, "tensor_parallel_size": tensor_parallel_size, "max_model_len": 200}
    with pytest.raises(ConfigError, match="at most 64"):
        LLM(str(folder), **options)
    with caplog.at_level(logging.INFO, "tp_engine"):
        llm = LLM(str(folder), hf_overrides={"rope_parameters": YARN}, **options)
    with llm:
        assert "changed by hf_overrides" in caplog.text and '"yarn"' in caplog.text
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    found = output.outputs[0]
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, **YARN}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, *found.token_ids]])
        scores = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert scores.argmax(-1).tolist() == list(found.token_ids)
    entries = zip(found.token_ids, found.logprobs or (), strict=True)
    own = torch.tensor([entry[token].logprob for token, entry in entries])
    assert (scores.max(-1).values - own).abs().max() < 1e-4
