"""How well a model predicts a text: its perplexity, exp of the mean of -log p over all tokens after the first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine import LLM

# Chunks of 64 tokens, so that most of what a token attends to comes from the KV cache, as it is kept there.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 128,
}


def perplexity(folder: str, text: str, **options: Any) -> float:
    """Of the model in ``folder``, whose engine has ``OPTIONS`` and ``options``; at most 2,047 tokens of ``text``."""
    from tp_engine import LLM

    with LLM(folder, **OPTIONS | options) as llm:
        found = text_logprobs(llm, text)
    return math.exp(-sum(found) / len(found))


def text_logprobs(llm: LLM, text: str) -> list[float]:
    """The log-probability of each token of ``text`` after the first."""
    from tp_engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([text], params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places if place is not None]
