"""Run cases of chats with several turns on torchrun's ranks; command line and file of cases as in ``parity_job``.

A case is ``{"options": {...}, "num_chats": n, "num_turns": n, "vocab_size": n, "num_arrivals": n}``.  In each turn all
chats go on at once, in another order: each prompt is all that was said before, and some new tokens.  Then as many
requests as ``num_arrivals`` arrive at random moments.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.kv_tiers import counts
from tests.ranks.parity_job import main
from tests.services import stepping
from tp_engine import LLM, SamplingParams, StructuredOutputsParams
from tp_engine.requests.request import EngineRequest, FinishReason

_REGEX = StructuredOutputsParams(regex="[a-c]{3,7}-[0-9]{2}x")
_COUNTS = (
    "num_preemptions", "num_loaded_blocks", "num_stored_blocks", "num_host_hit_tokens", "num_dropped_blocks",
    "num_disk_read_blocks", "num_disk_written_blocks", "num_disk_hit_tokens", "num_disk_failed_blocks",
)  # fmt: skip


def run_chats(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The tokens of each turn and sequence, the prompt tokens found cached in each turn, those of the arrivals, and the
    engine's counts."""
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
    stats = llm.engine.stats()
    found = {"tokens": tokens, "cached": cached, **counts(stats, _COUNTS)}
    if case["num_arrivals"]:
        found["arrivals"] = run_arrivals(llm, case)
        found["late_preemptions"] = llm.engine.stats().num_preemptions - stats.num_preemptions
    llm.engine.check_integrity()
    assert llm.engine.stats().num_used_blocks == 0
    return found


def run_arrivals(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """Requests come while others run, share beginnings, fork, follow grammars, differ in priority; some are aborted.

    For each sequence the tokens, and whether it was aborted.
    """
    rng = random.Random(case["vocab_size"])
    waiting = [_arrival(llm, number, rng) for number in range(case["num_arrivals"])]
    found: dict[str, dict[str, Any]] = {
        f"{one.request_id}/{index}": {"tokens": [], "aborted": False}
        for one in waiting
        for index in range(one.params.n)
    }
    running: list[str] = []
    with stepping(llm) as engine:
        while waiting or engine.has_unfinished:
            while waiting and (rng.random() < 0.3 or not engine.has_unfinished):
                running.append(waiting[0].request_id)
                engine.add_request(waiting.pop(0))
            deltas = [*engine.abort([rng.choice(running)])] if rng.random() < 0.03 else []
            for delta in [*deltas, *engine.step()]:
                one = found[f"{delta.request_id}/{delta.index}"]
                one["tokens"] += delta.new_token_ids
                one["aborted"] |= delta.finish_reason is FinishReason.ABORT
    return found


def _arrival(llm: LLM, number: int, rng: random.Random) -> EngineRequest:
    """Four beginnings, each of which four or more prompts of up to 70 tokens have in common."""
    stem = [(7 * position + number % 4) % 90 + 3 for position in range(60)]
    prompt = stem[: rng.choice((9, 24, 40, 60))] + [rng.randrange(3, 97) for _ in range(rng.randint(1, 10))]
    params = SamplingParams(
        max_tokens=rng.randint(2, 30),
        temperature=rng.choice((0.0, 0.9)),
        seed=number,
        n=rng.choice((1, 1, 2, 3)),
        ignore_eos=True,
        structured_outputs=_REGEX if number % 3 == 0 else None,
    )
    return llm.input_processor.process(
        prompt, params, request_id=f"arrival-{number}", priority=rng.choice((0, 0, 1, -1)), arrival_s=time.monotonic()
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), run_chats)
