"""Run one batch of requests with every kind of source of draft tokens on the ranks of a job; for ``parity_job.main``.

An engine without speculation runs the batch once: that is the oracle.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.services import engine_of
from tp_engine import LLM, SamplingParams, StructuredOutputsParams
from tp_engine.features.speculation.feature import COUNTERS
from tp_engine.features.speculation.proposer import Proposal, Proposer
from tp_engine.features.speculation.proposers import Proposers
from tp_engine.features.speculation.scheduling import Speculation
from tp_engine.plan import IntArray
from tp_engine.sched.sequence import Sequence

OWN = ("own", "own again")  # those of the engine's method; at the second time it knows the answers
KINDS = (*OWN, "right", "wrong", "random", "longest", "partly right")


class Replay(Proposer):
    """Draft tokens from ``known``, all tokens of sequences that the engine has generated before."""

    def __init__(self, kind: str, known: list[list[int]], vocab_size: int) -> None:
        self.most_matched = {"replay": 3}
        self._kind, self._known, self._vocab_size = kind, known, vocab_size
        self._random = random.Random(len(kind))

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> list[Proposal]:
        """See ``Proposer``."""
        own, rng = tokens.tolist(), self._random
        found: list[int] = next((one[len(own) :][:count] for one in self._known if one[: len(own)] == own), [])
        wrong = [(token + 1) % self._vocab_size for token in found]
        noise = [rng.randrange(self._vocab_size) for _ in range(count)]
        place = rng.randint(0, len(found))
        made = {
            "right": found,
            "wrong": wrong,
            "random": noise[: rng.randint(0, count)],
            "longest": [*found, *noise[len(found) :]],
            "partly right": [*found[:place], *wrong[place:]],
        }[self._kind]
        return [Proposal(np.array(made, dtype=np.int32), rng.randint(0, 3), "replay")]


def _params(case: dict[str, Any]) -> SamplingParams:
    """Of JSON, which makes texts of the token ids in ``logit_bias``; ``regex`` is a grammar."""
    params = dict(case)
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    if "regex" in params:
        params["structured_outputs"] = StructuredOutputsParams(regex=params.pop("regex"))
    return SamplingParams(**params)


def run_kinds(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """For each kind, or for ``none``: tokens and log-probabilities, and what was drafted."""
    speculation = engine_of(llm).scheduler.feature(Speculation)
    found: dict[str, Any] = {}
    for kind in KINDS if speculation is not None else ("none",):
        if speculation is not None and kind not in OWN:
            source = Replay(kind, found["own"]["sequences"], case["vocab_size"])
            speculation.sources = Proposers([source], speculation.most_tokens)
        found[kind] = run_once(llm, case)
    return found


def run_once(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """Tokens and log-probabilities, and what was drafted."""
    before = COUNTERS.get(llm.engine.stats())
    params = [_params(one) for one in case["params"]]
    outputs = llm.generate(case["prompts"], params, use_tqdm=False)
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    samples = [sample for output in outputs for sample in output.outputs]
    found: dict[str, Any] = {
        "answers": [[one.token_ids, one.finish_reason, one.stop_reason, one.cumulative_logprob] for one in samples],
        "logprobs": [
            [[[token, entry.logprob] for token, entry in place.items()] for place in one.logprobs or ()]
            for one in samples
        ],
        "sequences": [[*output.prompt_token_ids, *one.token_ids] for output in outputs for one in output.outputs],
        "num_preemptions": stats.num_preemptions,
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }
    counters = COUNTERS.get(stats)
    if before is not None and counters is not None:
        found["num_runs"] = counters.num_drafts - before.num_drafts
        found["num_drafted"] = counters.num_draft_tokens - before.num_draft_tokens
        found["accepted_by"] = {name: right for name, (_, right) in counters.by_source.items()}
        found["num_accepted"] = counters.num_accepted_tokens - before.num_accepted_tokens
    return found
