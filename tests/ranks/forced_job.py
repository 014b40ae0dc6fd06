"""Requests whose tokens are prescribed, in a pool far too small for them: log-probabilities that can be compared.

A case is ``{"options": {...}, "num_prompts": n, "num_rounds": n, "vocab_size": n}``.  A request may say one token only,
so engines whose K/V differ a little still say the same, and run the same requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kv_tiers import counts
from tp_engine import LLM, SamplingParams

_COUNTS = ("num_preemptions", "num_stored_blocks", "num_loaded_blocks", "num_refused_blocks", "num_host_hit_tokens")


def run_forced(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The log-probability of each token, round by round, what was found cached, and the engine's counts.

    In each round prompts come again, in another order, and each has got longer by what it said.
    """
    rng = np.random.default_rng(case["vocab_size"])
    stems = [rng.integers(3, case["vocab_size"], 24).tolist() for _ in range(4)]
    prompts = [
        stems[number % 4] + rng.integers(3, case["vocab_size"], 5 + number % 7).tolist()
        for number in range(case["num_prompts"])
    ]
    logprobs: list[list[float]] = []
    cached = []
    for _ in range(case["num_rounds"]):
        order = rng.permutation(len(prompts)).tolist()
        params = [
            SamplingParams(
                max_tokens=8 + number % 5, temperature=0, logprobs=0, allowed_token_ids=[3 + number], ignore_eos=True
            )
            for number in order
        ]
        outputs = llm.generate([prompts[number] for number in order], params, use_tqdm=False)
        for number, output in zip(order, outputs, strict=True):
            sample = output.outputs[0]
            assert list(sample.token_ids) == [3 + number] * (8 + number % 5)
            places = sample.logprobs or []
            logprobs.append([place[3 + number].logprob for place in places])
            prompts[number] = prompts[number] + list(sample.token_ids)
        cached.append(sum(output.num_cached_tokens for output in outputs))
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    return {"logprobs": logprobs, "cached": cached, **counts(stats, _COUNTS)}
