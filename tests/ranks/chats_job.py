"""Run cases of chats with several turns on torchrun's ranks; command line and file of cases as in ``parity_job``.

A case is ``{"options": {...}, "num_chats": n, "num_turns": n, "vocab_size": n}``.  In each turn all chats go on at
once, in another order: each prompt is all that was said before, and some new tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.ranks.parity_job import main
from tp_engine import LLM, SamplingParams


def run_chats(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The tokens of each turn and sequence, the prompt tokens found cached in each turn, and the engine's counts."""
    rng = np.random.default_rng(case["vocab_size"])
    chats = [rng.integers(3, case["vocab_size"], 20 + number % 7).tolist() for number in range(case["num_chats"])]
    tokens, cached = [], []
    for turn in range(case["num_turns"]):
        order = rng.permutation(len(chats)).tolist()
        params = [
            SamplingParams(
                max_tokens=6 + chat % 4,
                temperature=0.0 if chat % 2 else 0.9,
                seed=100 * turn + chat,
                n=1 + (chat % 5 == 0),
                ignore_eos=True,
            )
            for chat in order
        ]
        outputs = llm.generate([chats[chat] for chat in order], params, use_tqdm=False)
        for chat, output in zip(order, outputs, strict=True):
            chats[chat] += list(output.outputs[0].token_ids) + rng.integers(3, case["vocab_size"], 5).tolist()
        tokens.append([[list(sample.token_ids) for sample in output.outputs] for output in outputs])
        cached.append(sum(output.num_cached_tokens for output in outputs))
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    names = ("num_preemptions", "num_loaded_blocks", "num_stored_blocks", "num_host_hit_tokens", "num_dropped_blocks")
    return {"tokens": tokens, "cached": cached, **{name: getattr(stats, name) for name in names}}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], run_chats)
