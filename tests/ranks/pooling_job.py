"""Embeddings and scores on the ranks of a job; command line and file of cases as in ``parity_job``.

A case is ``{"options": {...}, "prompts": [[id, ...], ...], "pairs": [[query, document], ...]}``.
"""

from __future__ import annotations

from typing import Any

from tests.services import run_by_hand
from tp_engine import LLM, SamplingParams
from tp_engine.api.pooling import Pooler
from tp_engine.api.scoring import ScorePairs
from tp_engine.requests.request import EngineRequest, Pooling


def run_pooling(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """What the model gives: embeddings, or hidden states, scores and tokens from one batch of all kinds of requests.

    Each prompt is embedded twice: the second time its prefix may be cached.
    """
    embeds = llm.engine.model_info.convert == "embed"
    found: dict[str, Any] = {}
    if embeds:
        found["vectors"] = [
            [output.outputs.embedding for output in llm.embed(case["prompts"], use_tqdm=False)] for _ in range(2)
        ]
        found["scores"] = [
            output.outputs.score
            for output in llm.score([pair[0] for pair in case["pairs"]], [pair[1] for pair in case["pairs"]])
        ]
    else:
        found |= _mixed(llm, case)
    stats = llm.engine.stats()
    found |= {"num_preemptions": stats.num_preemptions, "num_cached": stats.num_prefix_hit_tokens}
    llm.engine.check_integrity()
    assert stats.num_used_blocks == 0
    return found


def run_classifier(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The scores of the last token, or of all, of every prompt, from one batch of both, twice: ``classify`` has those
    of the last tokens, unless the model only knows the others."""
    poolers = [Pooler.of(llm.input_processor, {"use_activation": False}, task) for task in case["tasks"]]
    found: dict[str, Any] = {pooler.task: [] for pooler in poolers}
    for number in range(2):
        requests = {
            pooler.task: [
                pooler.request(prompt, request_id=f"{pooler.task}-{number}-{place}")
                for place, prompt in enumerate(case["prompts"])
            ]
            for pooler in poolers
        }
        outputs = run_by_hand(llm, [request for group in zip(*requests.values(), strict=True) for request in group])
        for pooler in poolers:
            found[pooler.task].append(
                [pooler.values(outputs[request.request_id]).tolist() for request in requests[pooler.task]]
            )
    llm.engine.check_integrity()
    return found


def _mixed(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    processor, greedy = llm.input_processor, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    one = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    pairs = ScorePairs.of(processor, [(query, document) for query, document in case["pairs"]], request_id="score")
    requests: list[EngineRequest] = []
    for number, prompt in enumerate(case["prompts"]):
        requests.append(processor.process(prompt, greedy, request_id=f"text-{number}"))
        requests.append(processor.process(prompt, one, request_id=f"state-{number}", pooling=Pooling()))
        requests += pairs.requests[number : number + 1]
    outputs = run_by_hand(llm, requests)
    numbers = range(len(case["prompts"]))
    states = [outputs[f"state-{number}"].pooled for number in numbers]
    return {
        "states": [state.tolist() for state in states if state is not None],
        "tokens": [outputs[f"text-{number}"].outputs[0].token_ids for number in numbers],
        "scores": pairs.scores([outputs[request.request_id] for request in pairs.requests]),
        "num_prompts": [len(request.prompt_token_ids) for request in pairs.requests],
    }
