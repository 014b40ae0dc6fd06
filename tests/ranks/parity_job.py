"""Run engine cases one after another on the ranks of a job; rank 0 writes the generated tokens.

    torchrun --nproc-per-node N -m tests.ranks.parity_job CASES.json OUT.json

A case is ``{"options": {...}, "prompts": [[id, ...], ...], "max_tokens": [n, ...], "params": {...}}``.  Every case runs
its prompts as one batch.  A case without ``is_batch_only`` then runs the first prompt alone, and a beam search of the
first two prompts.  ``"fault"`` is what TP_ENGINE_FAULT is from then on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tp_engine import LLM, BeamSearchParams, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.engine.start import serve_rank
from tp_engine.requests.outputs import RequestOutput
from tp_engine.system import env

BEAMS: dict[str, Any] = {"beam_width": 3, "max_tokens": 6}


def run_case(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The tokens of the whole batch, of the first prompt alone, and of beams; afterwards the blocks must add up."""
    params = [SamplingParams(**{"max_tokens": n, **case["params"]}) for n in case["max_tokens"]]
    batch = llm.generate(case["prompts"], params, use_tqdm=False)
    if case.get("is_batch_only"):
        return run_batch_only(llm, batch)
    alone = llm.generate(case["prompts"][:1], params[:1], use_tqdm=False)
    stats = llm.engine.stats()
    beams = llm.beam_search(case["prompts"][:2], BeamSearchParams(ignore_eos=True, **BEAMS))
    llm.engine.check_integrity()
    assert llm.engine.stats().num_used_blocks == 0
    return {
        "batch": [[sample.token_ids for sample in output.outputs] for output in batch],
        "alone": [sample.token_ids for sample in alone[0].outputs],
        "beams": [[[one.tokens, one.cum_logprob] for one in output.sequences] for output in beams],
        "num_preemptions": stats.num_preemptions,
        "num_cached_tokens": sum(output.num_cached_tokens for output in batch),
    }


def run_batch_only(llm: LLM, batch: list[RequestOutput]) -> dict[str, Any]:
    """Tokens and their log-probabilities."""
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    samples = [output.outputs[0] for output in batch]
    return {
        "tokens": [sample.token_ids for sample in samples],
        "logprobs": [
            [found[token].logprob for token, found in zip(sample.token_ids, sample.logprobs or (), strict=True)]
            for sample in samples
        ],
        "num_preemptions": stats.num_preemptions,
        "num_cached_tokens": sum(output.num_cached_tokens for output in batch),
    }


def main(cases: Path, out: Path, run: Callable[[LLM, dict[str, Any]], dict[str, Any]] = run_case) -> None:
    """Rank 0 drives every case and the other ranks serve it, one case after the other."""
    gc.freeze()  # each start collects garbage, and would search all libraries for it
    launched = env.launched_rank()
    results = []
    for case in json.loads(cases.read_text(encoding="utf-8")):
        if "fault" in case:
            os.environ["TP_ENGINE_FAULT"] = case["fault"]
        if launched is not None and launched.rank > 0:
            serve_rank(EngineConfig(**case["options"]))
        else:
            with LLM(**case["options"]) as llm:
                results.append(run(llm, case))
    if launched is None or launched.rank == 0:
        out.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
