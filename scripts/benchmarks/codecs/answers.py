"""The error of log-probabilities behind a prompt whose blocks come back from the host tier.

::

    prompts 0, 1, ..    fill the pool and push each other out, until the codec has what it calibrates with
    prompt P            pushed out by others, then P and each ending: log-probabilities of all tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.codecs.texts import Texts
from tp_engine import LLM, SamplingParams
from tp_engine.units import ceil_div

_OTHERS = 8  # prompts that push P out of a pool of two


def engine_options(num_tokens: int, block_size: int, vocab_size: int) -> dict[str, Any]:
    """Options of an engine whose pool holds two prompts and their endings."""
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": 2 * (ceil_div(num_tokens, block_size) + 8),
        "max_model_len": num_tokens + 64,
        "max_num_seqs": 4,
        "max_logprobs": vocab_size,
        "kv_offloading_size": 0.5,
    }


def log_probabilities(
    model: str, options: Mapping[str, Any], texts: Texts, *, codec: str, num_calibration: int, num_endings: int
) -> torch.Tensor:
    """(endings, vocabulary) behind a prompt that comes back through ``codec``.

    ``RuntimeError`` if not all of its blocks did.
    """
    with LLM(model, kv_offloading_codec=codec, **options) as llm:
        vocab_size, block_size = options["max_logprobs"], options["block_size"]
        one = SamplingParams(max_tokens=1, temperature=0)
        number = 1
        while llm.engine.stats().num_stored_blocks <= num_calibration + options["num_gpu_blocks_override"]:
            llm.generate([texts.prompt(number)], one, use_tqdm=False)
            number += 1
        prompt = texts.prompt(0)
        for tokens in (prompt, *(texts.prompt(number + index) for index in range(_OTHERS))):
            llm.generate([tokens], one, use_tqdm=False)
        before = llm.engine.stats().num_loaded_blocks
        ask, found = SamplingParams(max_tokens=1, temperature=0, logprobs=vocab_size), []
        for ending in texts.endings(0, num_endings):
            (output,) = llm.generate([prompt + ending], ask, use_tqdm=False)
            (place,) = output.outputs[0].logprobs or []
            found.append([place[token].logprob for token in range(vocab_size)])
        num_loaded = llm.engine.stats().num_loaded_blocks - before
        if num_loaded < len(prompt) // block_size:
            raise RuntimeError(f"{num_loaded} of {len(prompt) // block_size} blocks came back")
    return torch.tensor(found)


def compare(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Errors of log-probabilities (endings, vocabulary) in nats."""
    errors = (found - exact).abs()
    likeliest = exact.argmax(-1, keepdim=True)
    divergence = (exact.exp() * (exact - found)).sum(-1)
    return {
        "likeliest_error": round(float(errors.gather(1, likeliest).max()), 5),
        "largest_logprob_error": round(float(errors.max()), 5),
        "mean_divergence": round(float(divergence.mean()), 7),
        "same_answers": round(float((found.argmax(-1) == exact.argmax(-1)).float().mean()), 4),
    }
